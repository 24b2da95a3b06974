// SPDX-License-Identifier: Apache-2.0
// The refused page: loads the page with the key that is typed here, and keeps the key for this tab.
"use strict";
async function open_with(key) {
  const answer = await fetch("vattn", { headers: { Authorization: "Bearer " + key } });
  if (!answer.ok) {
    sessionStorage.removeItem("vattn-key");
    document.getElementById("status").textContent = "The server did not accept this key.";
    return;
  }
  sessionStorage.setItem("vattn-key", key);
  const page = await answer.text();
  document.open();
  document.write(page);
  document.close();
}
document.getElementById("form").addEventListener("submit", (event) => {
  event.preventDefault();
  open_with(document.getElementById("key").value);
});
if (sessionStorage.getItem("vattn-key")) open_with(sessionStorage.getItem("vattn-key"));

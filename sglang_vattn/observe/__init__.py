# SPDX-License-Identifier: Apache-2.0
"""Looking into the pool: metrics, the log line, the page, and the command line.

One source: :meth:`observer.Observer.facts` in the scheduler's process. Everything else shows it.

::

    scheduler     reporting.facts -> observer -> metrics -> /metrics
                                        |  \\-> SGLang's log line
                                        \\-> state (pages, rows, tree; only when asked)
    HTTP server   /server_info, /vattn/state (by SGLang's internal-state call) -> page
    elsewhere     client -> top, snapshot
"""

STATE_RID = "vattn:state"  # a GetInternalStateReq with this id asks for everything, and for nothing of SGLang's

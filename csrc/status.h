// SPDX-License-Identifier: Apache-2.0
// How the core tells failure. Nothing below the Python bindings throws: a
// driver call that fails must be undone by its caller, and that is easier to
// get right (and to read) when failure is a value.
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace vattn {

class [[nodiscard]] Status {
 public:
  enum class Kind {
    kOk,
    kInvalid,  // the caller's mistake: ValueError in Python
    kDriver,   // CUDA or the operating system refused: DriverError in Python
  };

  Status() = default;
  static Status invalid(std::string text) { return {Kind::kInvalid, std::move(text)}; }
  static Status driver(std::string text) { return {Kind::kDriver, std::move(text)}; }

  bool ok() const { return kind_ == Kind::kOk; }
  Kind kind() const { return kind_; }
  const std::string& text() const { return text_; }

  // Keeps the first failure: for teardown, which goes on after an error.
  void merge(const Status& later) {
    if (ok()) *this = later;
  }

 private:
  Status(Kind kind, std::string text) : kind_(kind), text_(std::move(text)) {}

  Kind kind_ = Kind::kOk;
  std::string text_;
};

// A value or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::move(value)) {}
  Result(Status failure) : content_(std::move(failure)) {}

  bool ok() const { return std::holds_alternative<T>(content_); }
  T& value() & { return std::get<T>(content_); }
  T value() && { return std::get<T>(std::move(content_)); }
  const T& value() const& { return std::get<T>(content_); }
  Status status() const { return ok() ? Status() : std::get<Status>(content_); }

 private:
  std::variant<T, Status> content_;
};

}  // namespace vattn

// Failures as C++ exceptions, thrown without the GIL; module.cpp turns them into Python's.
#pragma once

#include <exception>
#include <string>

#include "driver.hpp"

namespace sonata {

enum class ErrorKind { argument, driver_unavailable, driver, forked_process };

// What the driver itself says about a result code.
struct DriverText {
  Result code = 0;
  std::string name;  // CUDA_ERROR_INVALID_IMAGE
  std::string text;  // device kernel image is invalid

  std::string describe() const;
};

struct Error : std::exception {
  Error(ErrorKind kind, std::string message, std::string remedy, DriverText driver = {});

  const char *what() const noexcept override { return message.c_str(); }

  ErrorKind kind;
  std::string message;
  std::string remedy;
  DriverText driver;  // of ErrorKind::driver
};

// A driver call and the code that it returned.
struct Failure {
  const char *call = nullptr;
  Result code = 0;

  explicit operator bool() const { return code != 0; }
};

DriverText driver_text(const DriverApi &api, Result code);

// What to do about a code. `arch` is the device's (sm86), where a build command names one.
std::string remedy_for(Result code, const std::string &arch = "<arch>");

// `context` names what was being done: "loading 'gemv' on device 0". `remedy` replaces the one
// that goes with the code.
[[noreturn]] void throw_driver_error(const DriverApi &api, Failure failure,
                                     const std::string &context, std::string remedy = {});

[[noreturn]] void throw_argument_error(std::string message, std::string remedy);

// The text in single quotes.
std::string quoted(const std::string &text);

}  // namespace sonata

#include "python_error.hpp"

#include <string>

namespace nb = nanobind;
using namespace nb::literals;

namespace sonata {

namespace {

const char *class_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::argument: return "ArgumentError";
    case ErrorKind::driver_unavailable: return "DriverUnavailable";
    case ErrorKind::forked_process: return "ForkedProcess";
    case ErrorKind::driver: break;
  }
  return "DriverError";
}

}  // namespace

nb::object text(const std::string &bytes) {
  return nb::steal(PyUnicode_DecodeUTF8(bytes.data(), Py_ssize_t(bytes.size()), "replace"));
}

// The classes are Python's: imported when the first error is raised, so that this module imports
// by itself.
void raise_python(const Error &error) {
  const nb::object type =
      nb::module_::import_("sonata_aot.artifacts.errors").attr(class_name(error.kind));
  const nb::object raised = type(text(error.message), "remedy"_a = text(error.remedy));
  if (error.kind == ErrorKind::driver) {
    raised.attr("code") = error.driver.code;
    raised.attr("name") = text(error.driver.name);
    raised.attr("text") = text(error.driver.text);
  }
  PyErr_SetObject(type.ptr(), raised.ptr());
}

}  // namespace sonata

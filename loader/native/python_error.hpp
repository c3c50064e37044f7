// Failures as Python's exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>

#include "error.hpp"

namespace sonata {

// The driver's text and a compiler's log may hold any bytes; an error about them must not fail.
nanobind::object text(const std::string &bytes);

// Sets the exception of sonata_aot.artifacts.errors.
void raise_python(const Error &error);

// Runs what returns a reference or null; null with an exception set where it throws. For functions
// that Python calls without nanobind.
template <typename Work>
PyObject *guarded(Work &&work) noexcept {
  try {
    return work();
  } catch (const Error &error) {
    raise_python(error);
  } catch (nanobind::python_error &error) {
    error.restore();
  } catch (const nanobind::builtin_exception &error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace sonata

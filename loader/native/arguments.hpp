// Checks of Python arguments, written for the launch path: no copies, no temporaries.
#pragma once

#include <nanobind/nanobind.h>

#include "kernel.hpp"

namespace sonata {

// The three extents, each checked against the hardware's limits. Raises TypeError or ArgumentError.
Dim3 parse_grid(const Kernel &kernel, nanobind::handle grid);
Dim3 parse_block(const Kernel &kernel, nanobind::handle block);

// A stream handle, as torch.cuda.Stream.cuda_stream holds it.
Stream parse_stream(const Kernel &kernel, nanobind::handle stream);

// Checks the length of a packed parameter block.
void check_params(const Kernel &kernel, std::size_t size);

// A number of bytes of shared memory.
int parse_shared_bytes(const std::string &entry, nanobind::handle shared_bytes);

}  // namespace sonata

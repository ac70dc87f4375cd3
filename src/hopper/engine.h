// The engine for GPUs of compute capability 9.0, for 16-bit types. It serves KV in FP8, the head
// dimensions of multi-head latent attention, and paged KV of any page size and with a bias where
// queries are few, other paged KV where they are many too. Another engine runs the backward pass of
// problems that its own kernels do not serve.
#pragma once
#include "core/engine.h"

namespace tea::hopper {

// The Executable does backward only if backward_limit() is empty. Of what the problem says of
// gradients, nothing else is used.
Attempt plan(const Problem& problem, const Device& device);
uint64_t workspace(const Problem& problem, const Geometry& size, Direction direction);

// Whether the decoding kernels alone serve a problem: KV in FP8, batch-invariant problems, and the
// head dimensions and the paged KV that the forward kernels lack.
bool decodes_only(const Problem& problem);

// Whether its forward kernels serve a run of a problem that plan() has accepted: false for such
// problems where the run has too many queries, whose number is not part of the problem if they are
// ragged.
bool serves(const Problem& problem, const Run& run);

// Why the backward kernels do not serve a problem; empty if they do.
std::string backward_limit(const Problem& problem);

// The fields of a Problem that it understands.
std::span<const Known> known_fields();

}  // namespace tea::hopper

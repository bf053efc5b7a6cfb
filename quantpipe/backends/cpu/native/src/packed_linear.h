// A linear in memory: packed panels and what its kernels need to know of them.
#pragma once

#include "aligned.h"
#include "linear_kernels.h"

namespace qp {

struct Linear {
    LinearView view{};
    Aligned weights, scales, zeros, bias;

    int64_t num_bytes() const { return static_cast<int64_t>(weights.size() + scales.size() + zeros.size() + bias.size()); }
};

// Activations as these kernels read them; they and the threads' scratch lie in the workspace.
Activations linear_prepare(const LinearKernels& kernels, const Linear& linear, const float* x, int64_t ldx,
                           int num_tokens, Workspace& workspace, Threads& threads);

// What linear_run does, with the kernels of a given instruction set.
void linear_run_with(const LinearKernels& kernels, const Linear& linear, const float* x, int64_t ldx, int num_tokens,
                     float* y, int64_t ldy, Workspace& workspace, Threads& threads);

}  // namespace qp

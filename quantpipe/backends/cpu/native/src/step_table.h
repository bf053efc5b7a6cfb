// The table of a step's kernels for one instruction set.
#pragma once

#include "attention_kernel.h"
#include "kv_codes.h"
#include "rows.h"
#include "step_kernels.h"

namespace qp {
namespace {

template <class S>
constexpr StepKernels make_step_kernels() {
    return {norm_rows<S>,  add_rows<S>,        gate_rows<S>, turn_heads<S>,
            write_key_value<S>, attend_task<S>, argmax_of<S>};
}

}  // namespace
}  // namespace qp

// Whether the arithmetic of a step is right on this machine.
#pragma once

#include "step_kernels.h"

namespace qp {

// Which part of these kernels disagrees with plain ones, or null.
const char* find_step_fault(const StepKernels& kernels, const StepKernels& plain);

}  // namespace qp

// Which instruction set the kernels run in: the best one that this CPU has and that agrees with plain C++.
#pragma once

#include "linear_kernels.h"
#include "step_kernels.h"

namespace qp {

struct Isa {
    const char* name;
    LinearKernels linear;
    StepKernels step;
};

// Each is null where this library was compiled without it.
const Isa* isa_scalar();
const Isa* isa_emulated();  // plain C++ in the form of the widest vectors: for tests
const Isa* isa_avx2();
const Isa* isa_avxvnni();
const Isa* isa_avx512();

// The one in use. Chosen at the first call: QUANTPIPE_CPU_ISA names the highest one to consider.
const Isa& isa();

// What is wrong with the arithmetic of these kernels on this machine, or null.
const char* find_fault(const Isa& isa);

}  // namespace qp

extern "C" {
// The name of the one in use.
const char* qp_isa_name();
// Why it is not a better one, or an empty string.
const char* qp_isa_note();
// Use this one from now on (scalar, emulated, avx2, avxvnni, avx512). 0, or -1 with qp_last_error(). Not while linears run.
int32_t qp_isa_select(const char* name);
}

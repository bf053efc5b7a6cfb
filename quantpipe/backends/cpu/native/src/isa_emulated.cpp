#include "isa.h"

#ifdef QP_ISA_ABSENT

const qp::Isa* qp::isa_emulated() { return nullptr; }

#else

#include "simd_scalar.h"

#include "linear_blocks.h"
#include "step_table.h"

const qp::Isa* qp::isa_emulated() {
    using Vectors = Scalar<16, true>;
    static constexpr Isa isa{"emulated", linear_kernels<Vectors>(), make_step_kernels<Vectors>()};
    return &isa;
}

#endif

#include "isa.h"

#ifdef QP_ISA_ABSENT

const qp::Isa* qp::isa_avx2() { return nullptr; }

#else

#include "simd_avx2.h"

#include "linear_blocks.h"
#include "step_table.h"

const qp::Isa* qp::isa_avx2() {
    static constexpr Isa isa{"avx2", linear_kernels<Avx2>(), make_step_kernels<Avx2>()};
    return &isa;
}

#endif

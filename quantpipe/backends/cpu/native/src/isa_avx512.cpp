#include "isa.h"

#ifdef QP_ISA_ABSENT

const qp::Isa* qp::isa_avx512() { return nullptr; }

#else

#include "simd_avx512.h"

#include "linear_blocks.h"
#include "step_table.h"

const qp::Isa* qp::isa_avx512() {
    static constexpr Isa isa{"avx512", linear_kernels<Avx512>(), make_step_kernels<Avx512>()};
    return &isa;
}

#endif

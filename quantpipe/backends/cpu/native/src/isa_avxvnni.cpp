#include "isa.h"

#ifdef QP_ISA_ABSENT

const qp::Isa* qp::isa_avxvnni() { return nullptr; }

#else

#include "simd_avx2.h"

#include "linear_blocks.h"
#include "step_table.h"

const qp::Isa* qp::isa_avxvnni() {
    static constexpr Isa isa{"avxvnni", linear_kernels<Avx2>(), make_step_kernels<Avx2>()};
    return &isa;
}

#endif

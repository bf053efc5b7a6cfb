#include "simd_scalar.h"

#include "isa.h"
#include "linear_blocks.h"
#include "step_table.h"

const qp::Isa* qp::isa_scalar() {
    using Vectors = Scalar<8, false>;
    static constexpr Isa isa{"scalar", linear_kernels<Vectors>(), make_step_kernels<Vectors>()};
    return &isa;
}

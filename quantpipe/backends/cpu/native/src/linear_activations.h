// Activations as the kernels read them: copied, or as integers with a scale per token and group.
//
// Shapes: T tokens, K in_features.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "linear_kernels.h"

namespace qp {
namespace {

template <class V>
struct ActivationWriter {
    using F = typename V::F;
    using I = typename V::I;

    static void write(const LinearView& view, const float* x, int64_t ldx, int begin, int end, const Activations& out,
                      float* scratch) {
        for (int t = begin; t < end; ++t) {
            const float* row = x + t * ldx;
            uint8_t* target = out.x + t * out.row_bytes;
            if (out.form == ActivationForm::floats) {
                fill(view, row, reinterpret_cast<float*>(target));
                continue;
            }
            if (view.k != view.k_padded) {
                fill(view, row, scratch);
                row = scratch;
            }
            const int64_t first = int64_t{t} * view.num_groups();
            for (int g = 0; g < view.num_groups(); ++g) {
                quantize(view, row, g * view.group, out, target, out.scales + first + g, out.starts + first + g);
            }
        }
    }

   private:
    static void fill(const LinearView& view, const float* row, float* target) {
        std::memcpy(target, row, sizeof(float) * view.k);
        std::memset(target + view.k, 0, sizeof(float) * (view.k_padded - view.k));
    }

    static void quantize(const LinearView& view, const float* row, int first, const Activations& out, uint8_t* target,
                         float* scale, int32_t* start) {
        const float absmax = largest_magnitude(row + first, view.group);
        const bool is_finite = absmax <= std::numeric_limits<float>::max();
        // A row of zeros gets a scale too; one that is not finite shows in everything computed from it.
        *scale = is_finite ? (absmax == 0 ? 1.0f : absmax) / view.divisor : std::numeric_limits<float>::quiet_NaN();
        const float limit = view.activation_bits == 8 ? 127.0f : view.divisor;
        const F divisor = V::set(*scale), high = V::set(limit);
        const F low = V::set(view.activation_bits == 8 ? -128.0f : -limit);
        I total = V::izero();
        for (int k = first; k < first + view.group; k += V::W) {
            const F scaled = V::div(V::load(row + k), divisor);
            const I q = is_finite ? V::round(V::min(V::max(scaled, low), high)) : V::izero();
            total = V::iadd(total, q);
            if (out.form == ActivationForm::bytes) {
                V::store_s8(reinterpret_cast<int8_t*>(target) + k, q);
            } else {
                V::store_s16_in_pairs(reinterpret_cast<int16_t*>(target) + k, q);
            }
        }
        *start = -V::isum(total) * (view.zeros == nullptr ? view.center() : 1);
    }

    // NaN where any of them is a NaN or an infinity.
    static float largest_magnitude(const float* x, int count) {
        F top = V::zero(), poison = V::zero();
        for (int k = 0; k < count; k += V::W) {
            const F value = V::load(x + k);
            top = V::max(top, V::abs(value));
            poison = V::add(poison, V::mul(value, V::zero()));
        }
        return V::largest(top) + V::sum(poison);
    }
};

}  // namespace
}  // namespace qp

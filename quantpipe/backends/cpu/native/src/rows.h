// What is done to rows of floats between the linears: norms, sums, gates, rope, the largest logit.
//
// Shapes: P pairs of dimensions that rope turns.
#pragma once

#include <cmath>
#include <cstdint>

#include "exp.h"
#include "plan.h"

namespace qp {
namespace {

template <class S>
float sum_of_squares(const float* x, int size) {
    constexpr int W = S::W;
    typename S::F sums[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
    int i = 0;
    for (; i + 4 * W <= size; i += 4 * W) {
        for (int j = 0; j < 4; ++j) {
            const typename S::F v = S::load(x + i + j * W);
            sums[j] = S::fma(v, v, sums[j]);
        }
    }
    for (; i + W <= size; i += W) {
        const typename S::F v = S::load(x + i);
        sums[0] = S::fma(v, v, sums[0]);
    }
    float total = S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])));
    for (; i < size; ++i) total += x[i] * x[i];
    return total;
}

template <class S>
void norm_rows(const float* x, int64_t ldx, int64_t num_rows, int size, const float* weight, float eps, float* out,
               int64_t ld_out) {
    constexpr int W = S::W;
    for (int64_t r = 0; r < num_rows; ++r, x += ldx, out += ld_out) {
        const float factor = 1.0f / std::sqrt(sum_of_squares<S>(x, size) / static_cast<float>(size) + eps);
        const typename S::F factors = S::set(factor);
        int i = 0;
        for (; i + W <= size; i += W) {
            S::store(out + i, S::mul(S::mul(S::load(x + i), factors), S::load(weight + i)));
        }
        for (; i < size; ++i) out[i] = x[i] * factor * weight[i];
    }
}

template <class S>
void add_rows(float* x, const float* y, int64_t count) {
    int64_t i = 0;
    for (; i + S::W <= count; i += S::W) S::store(x + i, S::add(S::load(x + i), S::load(y + i)));
    for (; i < count; ++i) x[i] += y[i];
}

template <class S>
typename S::F sigmoid_times(typename S::F x, typename S::F angle) {
    return S::div(x, S::add(S::set(1.0f), exp_of<S>(S::sub(S::zero(), angle))));
}

template <class S>
struct Silu {
    static typename S::F of(typename S::F x) { return sigmoid_times<S>(x, x); }
};

// x / 2 * (1 + tanh u) = x * sigmoid(2u) with u = sqrt(2 / pi) * (x + 0.044715 x^3)
template <class S>
struct GeluTanh {
    static typename S::F of(typename S::F x) {
        const typename S::F cubic = S::fma(S::mul(S::set(0.044715f), S::mul(x, x)), x, x);
        return sigmoid_times<S>(x, S::mul(S::set(1.59576912f), cubic));
    }
};

template <class S, template <class> class Activation>
void gate_row(float* gate, const float* up, int size) {
    constexpr int W = S::W;
    int i = 0;
    for (; i + W <= size; i += W) {
        S::store(gate + i, S::mul(Activation<S>::of(S::load(gate + i)), S::load(up + i)));
    }
    if (i == size) return;
    float rest[W] = {};
    for (int j = i; j < size; ++j) rest[j - i] = gate[j];
    S::store(rest, Activation<S>::of(S::load(rest)));
    for (; i < size; ++i) gate[i] = rest[i % W] * up[i];
}

template <class S>
void gate_rows(int activation, float* gate, const float* up, int64_t ld, int64_t num_rows, int size) {
    for (int64_t r = 0; r < num_rows; ++r, gate += ld, up += ld) {
        if (activation == QP_SILU) gate_row<S, Silu>(gate, up, size);
        else gate_row<S, GeluTanh>(gate, up, size);
    }
}

// Not fused, so that keys get the codes that plain float32 arithmetic gives them.
template <class S>
void turn_heads(float* x, int num_heads, int head_dim, int num_pairs, const float* cos_sin) {
    constexpr int W = S::W;
    const float *cos = cos_sin, *sin = cos_sin + num_pairs;
    for (int h = 0; h < num_heads; ++h, x += head_dim) {
        float* second = x + num_pairs;
        int i = 0;
        for (; i + W <= num_pairs; i += W) {
            const typename S::F a = S::load(x + i), b = S::load(second + i);
            const typename S::F c = S::load(cos + i), s = S::load(sin + i);
            S::store(x + i, S::sub(S::mul(a, c), S::mul(b, s)));
            S::store(second + i, S::add(S::mul(b, c), S::mul(a, s)));
        }
        for (; i < num_pairs; ++i) {
            const float a = x[i], b = second[i];
            x[i] = a * cos[i] - b * sin[i];
            second[i] = b * cos[i] + a * sin[i];
        }
    }
}

// The largest of W * n values; NaN where one is.
template <class S>
float largest_of(const float* x, int num_vectors) {
    using F = typename S::F;
    F top = S::load(x);
    // The sign of a lane is lost where the bits of a magnitude exceed those of infinity.
    typename S::I numbers = S::iset(-1);
    for (int i = 0; i < num_vectors; ++i) {
        const F v = S::load(x + i * S::W);
        top = S::max(v, top);
        numbers = S::iand(numbers, S::isub(S::as_int(S::abs(v)), S::iset(0x7f800001)));
    }
    int32_t signs[S::W];
    S::istore(signs, numbers);
    for (int32_t sign : signs) {
        if (sign >= 0) return NAN;
    }
    return S::largest(top);
}

template <class S>
int64_t argmax_of(const float* x, int64_t size) {
    constexpr int64_t kRun = 64 * S::W;
    float top = -INFINITY;
    int64_t start = 0;
    for (int64_t i = 0; i < size; i += kRun) {
        const int64_t count = size - i < kRun ? size - i : kRun, whole = count / S::W * S::W;
        float found = whole ? largest_of<S>(x + i, static_cast<int>(whole / S::W)) : -INFINITY;
        for (int64_t j = i + whole; j < i + count; ++j) found = x[j] > found || std::isnan(x[j]) ? x[j] : found;
        if (std::isnan(found)) return -1;
        if (found > top) top = found, start = i;
    }
    if (!std::isfinite(top)) return -1;
    while (x[start] != top) ++start;
    return start;
}

}  // namespace
}  // namespace qp

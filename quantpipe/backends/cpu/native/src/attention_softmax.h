// A softmax over spans of scores that come one after another: what was summed is rescaled as larger scores appear.
//
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
//
// Shapes: D head_dim.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "exp.h"
#include "step_kernels.h"

namespace qp {
namespace {

struct Softmax {
    float* sums;       // [rows, D], rows ld apart, relative to the largest score so far
    int64_t ld;
    float* largest;    // [rows]
    float* totals;     // [rows] sums of the weights, likewise

    float* row(int64_t row) const { return sums + row * ld; }

    void clear(int num_rows) const {
        std::fill_n(sums, num_rows * ld, 0.0f);
        std::fill_n(largest, num_rows, -INFINITY);
        std::fill_n(totals, num_rows, 0.0f);
    }

    // Turns the scores [kSpan] of a row into weights.
    template <class S>
    void soften(int row, float* scores) const {
        typename S::F top = S::load(scores);
        for (int t = S::W; t < kSpan; t += S::W) top = S::max(top, S::load(scores + t));
        const float before = largest[row], now = std::max(before, S::largest(top));
        // A row that sees nothing yet: exp(-inf - 0) is 0, and a NaN stays one.
        const typename S::F base = S::set(now == -INFINITY ? 0.0f : now);
        typename S::F total = S::zero();
        for (int t = 0; t < kSpan; t += S::W) {
            const typename S::F weight = exp_of<S>(S::sub(S::load(scores + t), base));
            total = S::add(total, weight);
            S::store(scores + t, weight);
        }
        if (now != before) shrink<S>(row, before == -INFINITY ? 0.0f : std::exp(before - now));
        largest[row] = now;
        totals[row] += S::sum(total);
    }

   private:
    template <class S>
    void shrink(int row, float factor) const {
        totals[row] *= factor;
        float* own = this->row(row);
        for (int64_t d = 0; d < ld; d += S::W) S::store(own + d, S::mul(S::load(own + d), S::set(factor)));
    }
};

}  // namespace
}  // namespace qp

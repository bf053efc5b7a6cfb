// Softmax attention of one task: spans of context one after another, the softmax rescaled as larger scores appear.
//
// What a row gets does not depend on the rows beside it. Queries carry the softmax scale, scores the parameters of
// their key, probabilities those of their value; so codes are multiplied as they are.
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
//
// Shapes: D head_dim, G query heads that share the KV head.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "attention_source.h"
#include "exp.h"

namespace qp {
namespace {

// Up to so many rows codes are widened anew for every few rows: cheaper than writing them down as floats.
constexpr int kMaxDirectRows = 12;

template <class S>
class Attention {
   public:
    explicit Attention(const AttentionTask& task)
        : task_(task),
          dim_(task.layout->head_dim),
          ld_(padded_dim(dim_)),
          num_rows_(task.num_queries * task.num_heads),
          keys_(task, true),
          values_(task, false) {
        float* next = task.scratch;
        const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
        query_ = take(num_rows_ * int64_t{dim_});
        sums_ = take(num_rows_ * ld_);
        weights_ = take(int64_t{num_rows_} * kSpan);
        largest_ = take(num_rows_), totals_ = take(num_rows_), query_sums_ = take(num_rows_);
        key_scales_ = take(kSpan), key_minima_ = take(kSpan), value_scales_ = take(kSpan), value_minima_ = take(kSpan);
        wide_keys_ = take(int64_t{kSpan} * dim_), wide_values_ = take(kSpan * ld_);
    }

    void run() {
        load_queries();
        std::memset(sums_, 0, sizeof(float) * num_rows_ * ld_);
        for (int r = 0; r < num_rows_; ++r) largest_[r] = -INFINITY, totals_[r] = 0;
        const int64_t end = std::min(task_.end_token, task_.first_position + task_.num_queries);
        int64_t start = task_.first_token;
        if (start >= task_.num_sinks) start = std::max(start, window_start(task_.first_position) / kSpan * kSpan);
        for (; start < end; start += kSpan) {
            const Visible visible = visible_from(start, end);
            if (!visible.any()) continue;
            prefetch_from(start + kSpan, end);
            score(visible);
            for (int r = 0; r < num_rows_; ++r) soften(r);
            weigh(visible);
        }
        finish();
    }

   private:
    int64_t position_of(int row) const { return task_.first_position + row / task_.num_heads; }
    int64_t window_start(int64_t position) const {
        return task_.window ? std::max<int64_t>(0, position + 1 - task_.window) : 0;
    }

    void load_queries() {
        const bool in_pairs = keys_.kind() == QP_KV_INT4;
        const float scale = task_.softmax_scale * (keys_.kind() == QP_KV_INT8_STATIC ? task_.key_scale : 1.0f);
        const int half = dim_ / 2;
        for (int r = 0; r < num_rows_; ++r) {
            const float* from = task_.query + r / task_.num_heads * task_.ld_query + r % task_.num_heads * dim_;
            float *to = query_ + int64_t{r} * dim_, sum = 0;
            for (int d = 0; d < dim_; ++d) {
                const float value = from[d] * scale;
                to[!in_pairs ? d : 2 * (d % half) + (d >= half)] = value;
                sum += value;
            }
            query_sums_[r] = sum;
        }
    }

    Visible visible_from(int64_t start, int64_t end) const {
        Visible visible{start, {}, {}};
        const int64_t window = window_start(task_.first_position);
        for (int i = 0; i < kTiles; ++i) {
            const int64_t token = start + i * kTile, last = std::min(end, token + kTile);
            int64_t from = std::max(token, window), to = last;
            if (token < task_.num_sinks) {
                if (from >= last) to = std::min(last, task_.num_sinks);
                from = token;
            }
            visible.first[i] = static_cast<int>(std::min<int64_t>(from - token, kTile));
            visible.end[i] = static_cast<int>(std::max<int64_t>(to - token, 0));
        }
        return visible;
    }

    bool is_direct(const HeadCodes& codes) const {
        return codes.in_tiles() && (num_rows_ <= kMaxDirectRows || codes.kind() == QP_KV_F32);
    }

    void prefetch_from(int64_t start, int64_t end) const {
        if (num_rows_ > kMaxDirectRows || !keys_.in_tiles()) return;
        for (int64_t token = start; token < std::min(end, start + kSpan); token += kTile) {
            if (token + kTile <= window_start(task_.first_position) && token >= task_.num_sinks) continue;
            keys_.prefetch(token);
            values_.prefetch(token);
        }
    }

    template <class Fn>
    void for_row_groups(Fn&& fn) const {
        const int num_groups = (num_rows_ + kMaxTileRows<S> - 1) / kMaxTileRows<S>;
        for (int group = 0, first = 0; group < num_groups; ++group) {
            const int count = (num_rows_ - first) / (num_groups - group);
            fn(first, count);
            first += count;
        }
    }

    void score(const Visible& visible) {
        KeyTiles tiles{{}, kTile * int64_t{4}, dim_};
        const bool direct = is_direct(keys_);
        if (direct) tiles.stride = keys_.row_stride(), tiles.num_rows = keys_.code_width();
        for (int i = 0; i < kTiles; ++i) {
            if (!visible.has(i)) continue;
            const int64_t token = visible.start + i * kTile;
            float* wide = wide_keys_ + int64_t{i} * kTile * dim_;
            if (!direct) widen_keys<S>(keys_, token, visible.first[i], visible.end[i], dim_, wide);
            tiles.tile[i] = direct ? keys_.tile(token) : reinterpret_cast<const uint8_t*>(wide);
        }
        for_row_groups([&](int first, int count) {
            score_function<S>(direct ? keys_.kind() : QP_KV_F32, count)(query_ + int64_t{first} * dim_, dim_, tiles,
                                                                        weights_ + int64_t{first} * kSpan);
        });
        apply_key_parameters(visible);
        for (int r = 0; r < num_rows_; ++r) hide(r, visible.start);
    }

    void load_parameters(const HeadCodes& codes, const Visible& visible, float* scales, float* minima) const {
        for (int i = 0; i < kTiles; ++i) {
            if (!visible.has(i)) continue;
            codes.parameters(visible.start + i * kTile, visible.first[i], visible.end[i], scales + i * kTile,
                             minima + i * kTile);
        }
    }

    void apply_key_parameters(const Visible& visible) {
        const bool has_minima = keys_.kind() == QP_KV_INT4;
        if (has_minima || keys_.kind() == QP_KV_INT8) {
            load_parameters(keys_, visible, key_scales_, key_minima_);
            for (int r = 0; r < num_rows_; ++r) {
                float* scores = weights_ + int64_t{r} * kSpan;
                const typename S::F sum = S::set(query_sums_[r]);
                for (int t = 0; t < kSpan; t += S::W) {
                    typename S::F score = S::mul(S::load(scores + t), S::load(key_scales_ + t));
                    if (has_minima) score = S::fma(sum, S::load(key_minima_ + t), score);
                    S::store(scores + t, score);
                }
            }
        }
        if (!task_.may_hold_not_finite || keys_.kind() != QP_KV_INT8_STATIC) return;
        for_not_finite(keys_, visible, [&](int token, int) {
            for (int r = 0; r < num_rows_; ++r) weights_[int64_t{r} * kSpan + token] = NAN;
        });
    }

    template <class Fn>
    void for_not_finite(const HeadCodes& codes, const Visible& visible, Fn&& fn) const {
        for (int i = 0; i < kTiles; ++i) {
            for (int t = visible.first[i]; t < visible.end[i]; ++t) {
                for (int d = 0; d < dim_; ++d) {
                    if (codes.code(visible.start + i * kTile + t, d) == kNotFiniteCode) fn(i * kTile + t, d);
                }
            }
        }
    }

    // -inf where a row does not look.
    void hide(int row, int64_t start) {
        float* scores = weights_ + int64_t{row} * kSpan;
        const int64_t position = position_of(row), end = std::min(task_.end_token, position + 1);
        const int64_t sinks = std::min(task_.num_sinks, end), seen = std::max(window_start(position), sinks);
        const auto offset = [start](int64_t token) {
            return static_cast<int>(std::min<int64_t>(kSpan, std::max<int64_t>(0, token - start)));
        };
        for (int t = offset(sinks); t < offset(seen); ++t) scores[t] = -INFINITY;
        for (int t = offset(end); t < kSpan; ++t) scores[t] = -INFINITY;
    }

    // Turns the scores of a row into weights relative to the largest score so far.
    void soften(int row) {
        float* weights = weights_ + int64_t{row} * kSpan;
        typename S::F top = S::load(weights);
        for (int t = S::W; t < kSpan; t += S::W) top = S::max(top, S::load(weights + t));
        const float before = largest_[row], largest = std::max(before, S::largest(top));
        // A row that sees nothing yet: exp(-inf - 0) is 0, and a NaN stays one.
        const typename S::F base = S::set(largest == -INFINITY ? 0.0f : largest);
        typename S::F total = S::zero();
        for (int t = 0; t < kSpan; t += S::W) {
            const typename S::F weight = exp_of<S>(S::sub(S::load(weights + t), base));
            total = S::add(total, weight);
            S::store(weights + t, weight);
        }
        if (largest != before) shrink(row, before == -INFINITY ? 0.0f : std::exp(before - largest));
        largest_[row] = largest;
        totals_[row] += S::sum(total);
    }

    void shrink(int row, float factor) {
        totals_[row] *= factor;
        float* sums = sums_ + row * ld_;
        for (int d = 0; d < ld_; d += S::W) S::store(sums + d, S::mul(S::load(sums + d), S::set(factor)));
    }

    void apply_value_parameters(const Visible& visible) {
        const bool has_minima = values_.kind() == QP_KV_INT4;
        if (!has_minima && values_.kind() != QP_KV_INT8) return;
        // What no row sees has weight 0 and takes no part.
        for (int t = 0; t < kSpan; ++t) value_scales_[t] = value_minima_[t] = 0;
        load_parameters(values_, visible, value_scales_, value_minima_);
        for (int r = 0; r < num_rows_; ++r) {
            float* weights = weights_ + int64_t{r} * kSpan;
            typename S::F shift = S::zero();
            for (int t = 0; t < kSpan; t += S::W) {
                const typename S::F weight = S::load(weights + t);
                if (has_minima) shift = S::fma(weight, S::load(value_minima_ + t), shift);
                S::store(weights + t, S::mul(weight, S::load(value_scales_ + t)));
            }
            if (!has_minima) continue;
            const typename S::F shifts = S::set(S::sum(shift));
            float* sums = sums_ + r * ld_;
            for (int d = 0; d < ld_; d += S::W) S::store(sums + d, S::add(S::load(sums + d), shifts));
        }
    }

    void weigh(const Visible& visible) {
        apply_value_parameters(visible);
        ValueTiles tiles{{}, {}, {}, ld_ * 4};
        const bool direct = is_direct(values_) && values_.code_width() % S::W == 0;
        if (direct) tiles.stride = values_.token_stride();
        for (int i = 0; i < kTiles; ++i) {
            float* wide = wide_values_ + i * kTile * ld_;
            tiles.tile[i] = reinterpret_cast<const uint8_t*>(wide);
            if (!visible.has(i)) continue;
            const int64_t token = visible.start + i * kTile;
            tiles.first[i] = visible.first[i], tiles.end[i] = visible.end[i];
            if (direct) tiles.tile[i] = values_.tile(token);
            else widen_values<S>(values_, token, visible.first[i], visible.end[i], dim_, wide);
        }
        for_row_groups([&](int first, int count) {
            weigh_function<S>(direct ? values_.kind() : QP_KV_F32, count)(
                weights_ + int64_t{first} * kSpan, tiles, direct ? dim_ : static_cast<int>(ld_), sums_ + first * ld_,
                ld_);
        });
        if (!task_.may_hold_not_finite || values_.kind() != QP_KV_INT8_STATIC) return;
        for_not_finite(values_, visible, [&](int token, int d) {
            for (int r = 0; r < num_rows_; ++r) {
                if (weights_[int64_t{r} * kSpan + token] != 0) sums_[r * ld_ + d] = NAN;
            }
        });
    }

    void finish() const {
        const float value_scale = values_.kind() == QP_KV_INT8_STATIC ? task_.value_scale : 1.0f;
        for (int r = 0; r < num_rows_; ++r) {
            const float* sums = sums_ + r * ld_;
            const bool is_whole = task_.out != nullptr;
            const float factor = is_whole ? value_scale / totals_[r] : value_scale;
            float* to = is_whole ? task_.out + r / task_.num_heads * task_.ld_out + r % task_.num_heads * dim_
                                 : task_.partial + int64_t{r} * dim_;
            for (int d = 0; d < dim_; ++d) to[d] = sums[d] * factor;
            if (is_whole) continue;
            task_.partial[int64_t{num_rows_} * dim_ + r] = largest_[r];
            task_.partial[int64_t{num_rows_} * (dim_ + 1) + r] = totals_[r];
        }
    }

    const AttentionTask& task_;
    int dim_;
    int64_t ld_;
    int num_rows_;
    HeadCodes keys_, values_;
    float *query_, *sums_, *weights_, *largest_, *totals_, *query_sums_;
    float *key_scales_, *key_minima_, *value_scales_, *value_minima_;
    float *wide_keys_, *wide_values_;
};

template <class S>
void attend_task(const AttentionTask& task) {
    Attention<S>(task).run();
}

}  // namespace
}  // namespace qp

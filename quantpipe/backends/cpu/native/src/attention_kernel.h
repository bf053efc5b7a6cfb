// Softmax attention of one task: spans of context one after another, the softmax rescaled as larger scores appear.
//
// What a row gets does not depend on the rows beside it. Queries carry the softmax scale, scores the parameters of
// their key, probabilities those of their value; so codes are multiplied as they are.
//
// Shapes: D head_dim, G query heads that share the KV head.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "attention_softmax.h"
#include "attention_source.h"
#include "attention_view.h"

namespace qp {
namespace {

// Up to so many rows codes are widened anew for every few rows: cheaper than writing them down as floats.
constexpr int kMaxDirectRows = 12;

// Queries as the keys are multiplied with them.
struct Queries {
    float* rows;    // [rows, D]
    float* sums;    // [rows], for the minima of keys
    float* scores;  // [rows, kSpan]
};

template <class S>
class Attention {
   public:
    explicit Attention(const AttentionTask& task)
        : task_(task),
          view_(task),
          dim_(task.layout->head_dim),
          ld_(padded_dim(dim_)),
          num_rows_(task.num_queries * task.num_heads),
          keys_(task, true),
          values_(task, false) {
        float* next = task.scratch;
        const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
        const int64_t rows = num_rows_;
        queries_ = {take(rows * dim_), take(rows), take(rows * kSpan)};
        softmax_ = {take(rows * ld_), ld_, take(rows), take(rows)};
        scales_ = take(kSpan), minima_ = take(kSpan);
        wide_keys_ = take(int64_t{kSpan} * dim_), wide_values_ = take(kSpan * ld_);
        if (task.sink_query) sink_queries_ = {take(rows * dim_), take(rows), take(rows * kSpan)};
    }

    void run() {
        prefetch_from(view_.next_span(task_.first_token));
        load_queries(task_.query, task_.ld_query, queries_);
        if (task_.sink_query) load_queries(task_.sink_query, task_.ld_out, sink_queries_);
        softmax_.clear(num_rows_);
        for (int64_t start = view_.next_span(task_.first_token); start < view_.end();
             start = view_.next_span(start + kSpan)) {
            const Visible visible = view_.visible_from(start);
            if (!visible.any()) continue;
            for (int i = 0; i < kTiles; ++i) {
                if (visible.has(i)) places_[i] = place_of(task_, start + i * kTile);
            }
            prefetch_from(view_.next_span(start + kSpan));
            score(visible);
            for (int r = 0; r < num_rows_; ++r) softmax_.template soften<S>(r, queries_.scores + r * kSpan);
            weigh(visible);
        }
        finish();
    }

   private:
    void load_queries(const float* query, int64_t ld, const Queries& queries) const {
        const float scale = task_.softmax_scale * (keys_.kind() == QP_KV_INT8_STATIC ? task_.key_scale : 1.0f);
        for (int r = 0; r < num_rows_; ++r) {
            const float* from = query + r / task_.num_heads * ld + r % task_.num_heads * dim_;
            float *to = queries.rows + int64_t{r} * dim_, sum = 0;
            for (int d = 0; d < dim_; ++d) to[d] = from[d] * scale;
            for (int d = 0; keys_.kind() == QP_KV_INT4 && d < dim_; ++d) sum += to[d];
            queries.sums[r] = sum;
        }
    }

    bool is_direct(const HeadCodes& codes) const {
        return codes.in_tiles() && (num_rows_ <= kMaxDirectRows || codes.kind() == QP_KV_F32);
    }

    void prefetch_from(int64_t start) const {
        if (num_rows_ > kMaxDirectRows || !keys_.in_tiles()) return;
        for (int64_t token = start; token < std::min(view_.end(), start + kSpan); token += kTile) {
            const Place place = place_of(task_, token);
            keys_.prefetch(place);
            values_.prefetch(place);
        }
    }

    template <class Fn>
    void for_row_groups(Fn&& fn) const {
        const int num_groups = (num_rows_ + kMaxTileRows - 1) / kMaxTileRows;
        for (int group = 0, first = 0; group < num_groups; ++group) {
            const int count = (num_rows_ - first) / (num_groups - group);
            fn(first, count);
            first += count;
        }
    }

    void widen_keys(const Visible& visible, int tile, float* wide) const {
        if (keys_.in_tiles()) return widen_key_tile<S>(keys_, places_[tile], wide);
        std::memset(wide, 0, sizeof(float) * dim_ * kTile);
        for (int i = visible.first[tile]; i < visible.end[tile]; ++i) {
            widen_key(keys_, place_of(task_, visible.start + tile * kTile + i), dim_, i, wide);
        }
    }

    // What no row sees stays as it was.
    void widen_values(const Visible& visible, int tile, float* wide) const {
        const bool in_vectors = values_.code_width() % S::W == 0 && dim_ == ld_ && values_.kind() != QP_KV_F32;
        if (values_.in_tiles() && in_vectors) {
            return widen_value_tile<S>(values_, places_[tile], visible.end[tile], dim_, wide);
        }
        for (int i = visible.first[tile]; i < visible.end[tile]; ++i) {
            widen_value(values_, place_of(task_, visible.start + tile * kTile + i), dim_, wide + i * ld_);
        }
    }

    void score(const Visible& visible) {
        const bool direct = is_direct(keys_);
        KeyTiles tiles{{}, kTile * int64_t{4}, dim_};
        if (direct) tiles.stride = keys_.row_stride(), tiles.num_rows = keys_.code_width();
        for (int i = 0; i < kTiles; ++i) {
            if (!visible.has(i)) continue;
            float* wide = wide_keys_ + int64_t{i} * kTile * dim_;
            if (!direct) widen_keys(visible, i, wide);
            tiles.tile[i] = direct ? keys_.at(places_[i]) : reinterpret_cast<const uint8_t*>(wide);
        }
        const int kind = direct ? keys_.kind() : QP_KV_F32;
        load_parameters(keys_, visible);
        score_tiles_of(queries_, tiles, kind);
        if (task_.sink_query && visible.start < task_.num_sinks) {
            score_tiles_of(sink_queries_, tiles, kind);
            const int64_t count = std::min<int64_t>(kSpan, task_.num_sinks - visible.start);
            for (int r = 0; r < num_rows_; ++r) {
                std::copy_n(sink_queries_.scores + r * kSpan, count, queries_.scores + r * kSpan);
            }
        }
        mark_not_finite_keys(visible);
        for (int r = 0; r < num_rows_; ++r) view_.hide(r, visible.start, queries_.scores + r * kSpan);
    }

    void score_tiles_of(const Queries& queries, const KeyTiles& tiles, int kind) const {
        for_row_groups([&](int first, int count) {
            score_function<S>(kind, count)(queries.rows + int64_t{first} * dim_, dim_, tiles,
                                           queries.scores + first * kSpan);
        });
        const bool has_minima = keys_.kind() == QP_KV_INT4;
        if (!has_minima && keys_.kind() != QP_KV_INT8) return;
        for (int r = 0; r < num_rows_; ++r) {
            float* scores = queries.scores + r * kSpan;
            const typename S::F sum = S::set(queries.sums[r]);
            for (int t = 0; t < kSpan; t += S::W) {
                typename S::F score = S::mul(S::load(scores + t), S::load(scales_ + t));
                if (has_minima) score = S::fma(sum, S::load(minima_ + t), score);
                S::store(scores + t, score);
            }
        }
    }

    // Tokens that no row sees get 0.
    void load_parameters(const HeadCodes& codes, const Visible& visible) {
        if (!codes.has_parameters()) return;
        for (int i = 0; i < kTiles; ++i) {
            float *scales = scales_ + i * kTile, *minima = minima_ + i * kTile;
            if (visible.has(i) && codes.in_tiles()) {
                codes.tile_parameters<S>(places_[i], visible.first[i], visible.end[i], scales, minima);
                continue;
            }
            for (int t = 0; t < kTile; ++t) scales[t] = minima[t] = 0;
            for (int t = visible.first[i]; t < visible.end[i]; ++t) {
                codes.token_parameters(place_of(task_, visible.start + i * kTile + t), scales + t, minima + t);
            }
        }
    }

    template <class Fn>
    void for_not_finite(const HeadCodes& codes, const Visible& visible, Fn&& fn) const {
        if (!task_.may_hold_not_finite || codes.kind() != QP_KV_INT8_STATIC) return;
        for (int i = 0; i < kTiles; ++i) {
            for (int t = visible.first[i]; t < visible.end[i]; ++t) {
                const Place place = place_of(task_, visible.start + i * kTile + t);
                for (int d = 0; d < dim_; ++d) {
                    if (codes.code(place, d) == kNotFiniteCode) fn(i * kTile + t, d);
                }
            }
        }
    }

    void mark_not_finite_keys(const Visible& visible) {
        for_not_finite(keys_, visible, [&](int token, int) {
            for (int r = 0; r < num_rows_; ++r) queries_.scores[r * kSpan + token] = NAN;
        });
    }

    void apply_value_parameters(const Visible& visible) {
        const bool has_minima = values_.kind() == QP_KV_INT4;
        if (!has_minima && values_.kind() != QP_KV_INT8) return;
        load_parameters(values_, visible);
        for (int r = 0; r < num_rows_; ++r) {
            float* weights = queries_.scores + r * kSpan;
            typename S::F shift = S::zero();
            for (int t = 0; t < kSpan; t += S::W) {
                const typename S::F weight = S::load(weights + t);
                if (has_minima) shift = S::fma(weight, S::load(minima_ + t), shift);
                S::store(weights + t, S::mul(weight, S::load(scales_ + t)));
            }
            if (!has_minima) continue;
            const typename S::F shifts = S::set(S::sum(shift));
            float* sums = softmax_.row(r);
            for (int d = 0; d < ld_; d += S::W) S::store(sums + d, S::add(S::load(sums + d), shifts));
        }
    }

    void weigh(const Visible& visible) {
        apply_value_parameters(visible);
        const bool direct = is_direct(values_) && values_.code_width() % S::W == 0;
        ValueTiles tiles{{}, {}, {}, direct ? values_.token_stride() : ld_ * 4};
        for (int i = 0; i < kTiles; ++i) {
            float* wide = wide_values_ + i * kTile * ld_;
            tiles.tile[i] = reinterpret_cast<const uint8_t*>(wide);
            if (!visible.has(i)) continue;
            tiles.first[i] = visible.first[i], tiles.end[i] = visible.end[i];
            if (direct) tiles.tile[i] = values_.at(places_[i]);
            else widen_values(visible, i, wide);
        }
        for_row_groups([&](int first, int count) {
            weigh_function<S>(direct ? values_.kind() : QP_KV_F32, count)(
                queries_.scores + first * kSpan, tiles, direct ? dim_ : static_cast<int>(ld_), softmax_.row(first),
                ld_);
        });
        for_not_finite(values_, visible, [&](int token, int d) {
            for (int r = 0; r < num_rows_; ++r) {
                if (queries_.scores[r * kSpan + token] != 0) softmax_.row(r)[d] = NAN;
            }
        });
    }

    void finish() const {
        const float value_scale = values_.kind() == QP_KV_INT8_STATIC ? task_.value_scale : 1.0f;
        for (int r = 0; r < num_rows_; ++r) {
            const float* sums = softmax_.row(r);
            const bool is_whole = task_.out != nullptr;
            const float factor = is_whole ? value_scale / softmax_.totals[r] : value_scale;
            float* to = is_whole ? task_.out + r / task_.num_heads * task_.ld_out + r % task_.num_heads * dim_
                                 : task_.partial + int64_t{r} * dim_;
            for (int d = 0; d < dim_; ++d) to[d] = sums[d] * factor;
            if (is_whole) continue;
            task_.partial[int64_t{num_rows_} * dim_ + r] = softmax_.largest[r];
            task_.partial[int64_t{num_rows_} * (dim_ + 1) + r] = softmax_.totals[r];
        }
    }

    const AttentionTask& task_;
    View view_;
    int dim_;
    int64_t ld_;
    int num_rows_;
    HeadCodes keys_, values_;
    Place places_[kTiles] = {};   // of the visible tiles of a span
    Queries queries_, sink_queries_{};
    Softmax softmax_{};
    float *scales_, *minima_;   // of the tokens of a span: of keys, then of values
    float *wide_keys_, *wide_values_;
};

template <class S>
void attend_task(const AttentionTask& task) {
    Attention<S>(task).run();
}

}  // namespace
}  // namespace qp

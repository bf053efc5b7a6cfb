// Which tokens the rows of a task see.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention_tiles.h"
#include "step_kernels.h"

namespace qp {
namespace {

// The tokens of each tile of a span that some row sees, with what lies between; first >= end: none.
struct Visible {
    int64_t start;   // of the span
    int first[kTiles], end[kTiles];

    bool has(int tile) const { return first[tile] < end[tile]; }
    bool any() const {
        for (int i = 0; i < kTiles; ++i) {
            if (has(i)) return true;
        }
        return false;
    }
};

class View {
   public:
    explicit View(const AttentionTask& task)
        : task_(task), end_(std::min(task.end_token, task.first_query + task.num_queries)) {}

    // Behind the last token that any row sees.
    int64_t end() const { return end_; }

    // The first span from `start` on in which a row may see something.
    int64_t next_span(int64_t start) const {
        if (start < task_.num_first) return start;
        return std::max(start, window_start(task_.first_query) / kSpan * kSpan);
    }

    Visible visible_from(int64_t start) const {
        // What the first row sees, which looks back furthest, and what the last one does.
        const int64_t query = task_.first_query;
        const int64_t intervals[3][2] = {{0, task_.num_sinks},
                                         {first_window_start(query), task_.num_first},
                                         {std::max(task_.num_first, window_start(query)), end_}};
        Visible visible{start, {}, {}};
        for (int i = 0; i < kTiles; ++i) {
            const int64_t token = start + i * kTile, last = std::min(end_, token + kTile);
            int64_t from = token + kTile, to = token;
            for (const auto& [first, end] : intervals) {
                if (std::max(first, token) >= std::min(end, last)) continue;
                from = std::min(from, std::max(first, token));
                to = std::max(to, std::min(end, last));
            }
            if (from >= to) continue;
            visible.first[i] = static_cast<int>(from - token), visible.end[i] = static_cast<int>(to - token);
        }
        return visible;
    }

    // -inf where a row does not look, among the scores of a span.
    void hide(int row, int64_t start, float* scores) const {
        const int64_t query = task_.first_query + row / task_.num_heads;
        hide_between(task_.num_sinks, std::min(task_.num_first, first_window_start(query)), start, scores);
        hide_between(task_.num_first, window_start(query), start, scores);
        hide_between(std::min(end_, query + 1), start + kSpan, start, scores);
    }

   private:
    int64_t window_start(int64_t query) const {
        return task_.window ? std::max<int64_t>(0, query + 1 - task_.window) : 0;
    }
    // Among the tokens up to num_first.
    int64_t first_window_start(int64_t query) const {
        if (!task_.window) return task_.num_sinks;
        return std::max(task_.num_sinks, query + task_.num_dropped + 1 - task_.window);
    }

    static void hide_between(int64_t first, int64_t end, int64_t start, float* scores) {
        const int64_t last = std::min<int64_t>(kSpan, end - start);
        for (int64_t t = std::max<int64_t>(0, first - start); t < last; ++t) scores[t] = -INFINITY;
    }

    const AttentionTask& task_;
    int64_t end_;
};

}  // namespace
}  // namespace qp

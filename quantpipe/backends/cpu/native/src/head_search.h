// The most likely token of each row, without logits that leave the cache.
//
// Shapes: T rows, K inputs of the head.
#pragma once

#include <cstdint>
#include <vector>

#include "aligned.h"
#include "linear.h"

namespace qp {

class HeadSearch {
   public:
    // best [T]: the lowest of the most likely ids, -1 where a row has none (a NaN, an infinity, nothing but -inf).
    void run(const Linear& head, const float* x, int ldx, int num_rows, int32_t* best, Workspace& workspace,
             Threads& threads);
    int64_t num_bytes() const;

   private:
    struct Found {
        float logit;
        int32_t id;   // -1: nothing yet; kBroken: a NaN or an infinity
    };
    static constexpr int32_t kBroken = -2;

    static Found find(const float* logits, int first, int count);

    std::vector<Aligned> tiles_;   // logits, per thread
    std::vector<Found> found_;     // [pieces of the vocabulary, T]
};

}  // namespace qp

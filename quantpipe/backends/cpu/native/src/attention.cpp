// Divides the attention of a step into tasks: by sequence, KV head, rows that fit the cache, and pieces of a context.
//
// How a sequence is divided depends on nothing but itself, so that its numbers do not depend on what else is in a step
// or on how many threads there are.
//
// Shapes: D head_dim, G query heads that share a KV head.
#include <algorithm>
#include <cmath>

#include "plan_parts.h"

namespace qp {
namespace {

// A decode's context beyond this is looked at in pieces, which threads share.
constexpr int64_t kPiece = 16 * kSpan;

// A task still without its place in the buffers. Pieces of the same rows follow one another.
struct Part {
    int sequence, kv_head, first_head, num_heads;
    int64_t first_row, first_query, num_queries;   // the row of the step that the sequence begins with
    int piece, num_pieces;
    int64_t partial;   // offset in floats
};

int64_t rows_of(const Part& part) { return part.num_queries * part.num_heads; }

class Division {
   public:
    Division(Step& step, int index)
        : step_(step),
          layer_(step.plan.layers[index]),
          layout_(layout_of(layer_, step.kv)),
          index_(index),
          group_(layer_.sizes.num_heads / layer_.sizes.num_kv_heads) {
        int64_t first_row = 0;
        for (int s = 0; s < step.batch.num_sequences; ++s) {
            if (step.batch.query_lens[s] > 0) add_sequence(s, first_row);
            first_row += step.batch.query_lens[s];
        }
        step.plan.buffers.partial.grow(num_partial_floats_ * 4);
    }

    void run() {
        Plan& plan = step_.plan;
        const int64_t scratch_bytes = attention_scratch_floats(layout_.head_dim) * 4;
        for (Aligned& scratch : plan.buffers.attention) scratch.grow(scratch_bytes);
        // The longest first: what is claimed last should end soon.
        std::stable_sort(parts_.begin(), parts_.end(), [&](const Part& a, const Part& b) { return work(a) > work(b); });
        plan.threads.parallel_for(static_cast<int>(parts_.size()), [&](int chunk, int thread) {
            plan.kernels.attend(task_of(parts_[chunk], plan.buffers.attention[thread].as<float>()));
        });
        if (num_partial_floats_ == 0) return;
        for (const Part& part : parts_) {
            if (part.num_pieces > 1 && part.piece == 0) merge(part);
        }
    }

   private:
    void add_sequence(int s, int64_t first_row) {
        const int64_t query_len = step_.batch.query_lens[s], context_len = step_.batch.context_lens[s];
        const int max_rows = attention_rows(layout_.head_dim), heads = std::min(group_, max_rows);
        const int64_t queries = std::max(1, max_rows / heads);
        const int num_pieces =
            query_len == 1 && !layer_.sizes.window ? static_cast<int>((context_len + kPiece - 1) / kPiece) : 1;
        for (int j = 0; j < layer_.sizes.num_kv_heads; ++j) {
            for (int head = 0; head < group_; head += heads) {
                for (int64_t query = 0; query < query_len; query += queries) {
                    add_parts({s, j, head, std::min(heads, group_ - head), first_row, query,
                               std::min(queries, query_len - query), 0, num_pieces, 0});
                }
            }
        }
    }

    void add_parts(Part part) {
        part.partial = num_partial_floats_;
        for (part.piece = 0; part.piece < part.num_pieces; ++part.piece) parts_.push_back(part);
        if (part.num_pieces > 1) num_partial_floats_ += part.num_pieces * piece_floats(part);
    }

    int64_t piece_floats(const Part& part) const { return rows_of(part) * (layout_.head_dim + 2); }

    int64_t first_position(const Part& part) const {
        return step_.batch.context_lens[part.sequence] - step_.batch.query_lens[part.sequence] + part.first_query;
    }

    // Tokens to look at, times rows.
    int64_t work(const Part& part) const {
        int64_t tokens = part.num_pieces > 1 ? kPiece : first_position(part) + part.num_queries;
        if (layer_.sizes.window) tokens = std::min<int64_t>(tokens, layer_.sizes.window + part.num_queries);
        return tokens * (8 + rows_of(part));
    }

    AttentionTask task_of(const Part& part, float* scratch) const {
        Plan& plan = step_.plan;
        const int64_t width = layer_.qkv_width(), row = part.first_row + part.first_query;
        const int64_t column = (int64_t{part.kv_head} * group_ + part.first_head) * layout_.head_dim;
        const int64_t static_scale = int64_t{index_} * layout_.num_kv_heads + part.kv_head;
        AttentionTask task{};
        task.layout = &layout_;
        task.cache = static_cast<const uint8_t*>(step_.kv.layers[index_]);
        task.block_table = step_.batch.block_table + int64_t{part.sequence} * step_.batch.table_width;
        task.kv_head = part.kv_head;
        task.key_scale = step_.kv.key_scales ? step_.kv.key_scales[static_scale] : 1.0f;
        task.value_scale = step_.kv.value_scales ? step_.kv.value_scales[static_scale] : 1.0f;
        task.may_hold_not_finite = plan.has_written_not_finite;
        task.query = plan.buffers.qkv.as<float>() + row * width + column;
        task.ld_query = width;
        task.ld_out = layer_.query_width();
        task.out = plan.buffers.attended.as<float>() + row * task.ld_out + column;
        task.num_queries = static_cast<int>(part.num_queries);
        task.num_heads = part.num_heads;
        task.first_position = first_position(part);
        task.end_token = step_.batch.context_lens[part.sequence];
        task.window = layer_.sizes.window;
        task.softmax_scale = layer_.sizes.softmax_scale;
        task.scratch = scratch;
        if (part.num_pieces == 1) return task;
        task.out = nullptr;
        task.partial = plan.buffers.partial.as<float>() + part.partial + part.piece * piece_floats(part);
        task.first_token = part.piece * kPiece;
        task.end_token = std::min(task.end_token, task.first_token + kPiece);
        return task;
    }

    // One query over several pieces: each sum counts as much as its largest score asks for.
    void merge(const Part& part) const {
        const AttentionTask task = task_of(part, nullptr);
        const int dim = layout_.head_dim, rows = part.num_heads;
        float* out = step_.plan.buffers.attended.as<float>() + (part.first_row + part.first_query) * task.ld_out +
                     (int64_t{part.kv_head} * group_ + part.first_head) * dim;
        for (int r = 0; r < rows; ++r, out += dim) {
            float largest = -INFINITY, total = 0;
            const auto largest_of = [&](int piece) { return task.partial + piece * piece_floats(part) + rows * dim + r; };
            for (int piece = 0; piece < part.num_pieces; ++piece) largest = std::max(largest, *largest_of(piece));
            std::fill_n(out, dim, 0.0f);
            for (int piece = 0; piece < part.num_pieces; ++piece) {
                const float* sums = task.partial + piece * piece_floats(part) + r * dim;
                const float factor = std::exp(*largest_of(piece) - largest);
                total += largest_of(piece)[rows] * factor;
                for (int d = 0; d < dim; ++d) out[d] += sums[d] * factor;
            }
            for (int d = 0; d < dim; ++d) out[d] /= total;
        }
    }

    Step& step_;
    const Layer& layer_;
    KVLayout layout_;
    int index_, group_;
    std::vector<Part> parts_;
    int64_t num_partial_floats_ = 0;
};

}  // namespace

void attend(Step& step, int index) { Division(step, index).run(); }

}  // namespace qp

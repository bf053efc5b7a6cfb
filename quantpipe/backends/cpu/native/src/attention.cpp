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

int64_t held_len(const Step& step, int sequence) {
    return step.batch.context_lens[sequence] - num_dropped(step, sequence);
}

int64_t first_query(const Step& step, const AttentionPart& part) {
    return held_len(step, part.sequence) - step.batch.query_lens[part.sequence] + part.first_query;
}

int64_t piece_floats(const LayerKind& kind, const AttentionPart& part) {
    return part.num_queries * part.num_heads * (kind.head_dim + 2);
}

void add_part(LayerKind& kind, AttentionPart part) {
    part.partial = kind.num_partial_floats;
    for (part.piece = 0; part.piece < part.num_pieces; ++part.piece) kind.parts.push_back(part);
    if (part.num_pieces > 1) kind.num_partial_floats += part.num_pieces * piece_floats(kind, part);
}

void add_sequence(Step& step, LayerKind& kind, int s, int64_t first_row) {
    const int64_t query_len = step.batch.query_lens[s], context_len = held_len(step, s);
    const int max_rows = attention_rows(kind.head_dim), group = kind.num_heads / kind.num_kv_heads;
    const int heads = std::min(group, max_rows);
    const int64_t queries = max_rows / heads;
    const int num_pieces = query_len == 1 ? static_cast<int>((context_len + kPiece - 1) / kPiece) : 1;
    for (int j = 0; j < kind.num_kv_heads; ++j) {
        for (int head = 0; head < group; head += heads) {
            for (int64_t query = 0; query < query_len; query += queries) {
                add_part(kind, {s, j, head, std::min(heads, group - head), first_row, query,
                                std::min(queries, query_len - query), 0, num_pieces, 0});
            }
        }
    }
}

// Tokens to look at, times rows.
int64_t work_of(const Step& step, const LayerKind& kind, const AttentionPart& part) {
    int64_t tokens = part.num_pieces > 1 ? kPiece : first_query(step, part) + part.num_queries;
    if (kind.step_window) tokens = std::min<int64_t>(tokens, kind.step_window + part.num_queries);
    return tokens * (8 + part.num_queries * part.num_heads);
}

// The attention of one layer.
class LayerAttention {
   public:
    LayerAttention(Step& step, int index)
        : step_(step),
          layer_(step.plan.layers[index]),
          kind_(step.plan.kinds[layer_.kind]),
          layout_(layout_of(layer_, step.kv)),
          index_(index) {}

    void run() {
        Plan& plan = step_.plan;
        const int64_t scratch_bytes = attention_scratch_floats(kind_.head_dim) * 4;
        for (Aligned& scratch : plan.buffers.attention) scratch.grow(scratch_bytes);
        plan.buffers.partial.grow(kind_.num_partial_floats * 4);
        plan.threads.parallel_for(static_cast<int>(kind_.parts.size()), [&](int chunk, int thread) {
            plan.kernels.attend(task_of(kind_.parts[chunk], plan.buffers.attention[thread].as<float>()));
        });
        if (kind_.num_partial_floats == 0) return;
        for (const AttentionPart& part : kind_.parts) {
            if (part.num_pieces > 1 && part.piece == 0) merge(part);
        }
    }

   private:
    int64_t column_of(const AttentionPart& part) const {
        const int group = kind_.num_heads / kind_.num_kv_heads;
        return (int64_t{part.kv_head} * group + part.first_head) * kind_.head_dim;
    }

    AttentionTask task_of(const AttentionPart& part, float* scratch) const {
        const StepBuffers& buffers = step_.plan.buffers;
        const int64_t row = part.first_row + part.first_query, width = layer_.qkv_width();
        AttentionTask task{};
        place_cache(part, task);
        task.query = buffers.qkv.as<float>() + row * width + column_of(part);
        task.ld_query = width;
        task.ld_out = layer_.query_width();
        const int64_t place = row * task.ld_out + column_of(part);
        if (kind_.meets_sinks) task.sink_query = buffers.sink_query.as<float>() + place;
        task.num_queries = static_cast<int>(part.num_queries);
        task.num_heads = part.num_heads;
        task.softmax_scale = layer_.sizes.softmax_scale;
        task.scratch = scratch;
        task.first_query = first_query(step_, part);
        task.end_token = held_len(step_, part.sequence);
        if (part.num_pieces == 1) {
            task.out = buffers.attended.as<float>() + place;
            return task;
        }
        task.partial = buffers.partial.as<float>() + part.partial + part.piece * piece_floats(kind_, part);
        task.first_token = part.piece * kPiece;
        task.end_token = std::min(task.end_token, task.first_token + kPiece);
        return task;
    }

    // Which part of the cache the task reads, and what of it is seen.
    void place_cache(const AttentionPart& part, AttentionTask& task) const {
        const qp_kv& kv = step_.kv;
        const int64_t scale = int64_t{index_} * layout_.num_kv_heads + part.kv_head;
        task.layout = &layout_;
        task.cache = static_cast<const uint8_t*>(kv.layers[index_]);
        task.block_table = step_.batch.block_table + int64_t{part.sequence} * step_.batch.table_width;
        task.kv_head = part.kv_head;
        task.key_scale = kv.key_scales ? kv.key_scales[scale] : 1.0f;
        task.value_scale = kv.value_scales ? kv.value_scales[scale] : 1.0f;
        task.may_hold_not_finite = step_.plan.has_written_not_finite;
        task.window = kind_.step_window;
        task.num_sinks = step_.batch.num_sinks;
        task.num_first = (task.num_sinks + kv.block_size - 1) / kv.block_size * kv.block_size;
        task.num_dropped = num_dropped(step_, part.sequence);
    }

    // One query over several pieces: each sum counts as much as its largest score asks for.
    void merge(const AttentionPart& part) const {
        const AttentionTask task = task_of(part, nullptr);
        const int dim = kind_.head_dim, rows = part.num_heads;
        const int64_t size = piece_floats(kind_, part);
        float* out = step_.plan.buffers.attended.as<float>() + (part.first_row + part.first_query) * task.ld_out +
                     column_of(part);
        for (int r = 0; r < rows; ++r, out += dim) {
            const float* ends = task.partial + rows * dim + r;   // largest score, and `rows` further the total
            float largest = -INFINITY, total = 0;
            for (int piece = 0; piece < part.num_pieces; ++piece) largest = std::max(largest, ends[piece * size]);
            std::fill_n(out, dim, 0.0f);
            for (int piece = 0; piece < part.num_pieces; ++piece) {
                const float* sums = task.partial + piece * size + r * dim;
                const float factor = std::exp(ends[piece * size] - largest);
                total += ends[piece * size + rows] * factor;
                for (int d = 0; d < dim; ++d) out[d] += sums[d] * factor;
            }
            for (int d = 0; d < dim; ++d) out[d] /= total;
        }
    }

    Step& step_;
    const Layer& layer_;
    const LayerKind& kind_;
    KVLayout layout_;
    int index_;
};

}  // namespace

void divide_attention(Step& step, LayerKind& kind) {
    kind.parts.clear();
    kind.num_partial_floats = 0;
    int64_t first_row = 0;
    for (int s = 0; s < step.batch.num_sequences; ++s) {
        if (step.batch.query_lens[s] > 0) add_sequence(step, kind, s, first_row);
        first_row += step.batch.query_lens[s];
    }
    if (step.plan.threads.size() == 1) return;
    // The longest first: what is claimed last should end soon.
    std::stable_sort(kind.parts.begin(), kind.parts.end(), [&](const AttentionPart& a, const AttentionPart& b) {
        return work_of(step, kind, a) > work_of(step, kind, b);
    });
}

void attend(Step& step, int index) { LayerAttention(step, index).run(); }

}  // namespace qp

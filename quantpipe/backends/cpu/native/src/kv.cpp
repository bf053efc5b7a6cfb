// What happens to a step's queries, keys and values before attention.
//
// Shapes: T tokens, D head_dim, J KV heads.
#include <algorithm>
#include <vector>

#include "plan_parts.h"

namespace qp {
namespace {

// An encoded value costs about so many additions.
constexpr int64_t kEncodeWork = 8;

void norm_heads(const StepKernels& kernels, const Norm& norm, float* heads, int num_heads) {
    if (!norm) return;
    const int dim = norm.size();
    kernels.norm(heads, dim, num_heads, dim, norm.weight.data(), norm.eps, heads, dim);
}

uint8_t* block_of(const Step& step, const KVLayout& layout, int index, int64_t slot) {
    return static_cast<uint8_t*>(step.kv.layers[index]) + slot / step.kv.block_size * layout.block_bytes;
}

// Every dimension of a key goes to a line of its own: asked for ahead, they come together.
void prefetch_keys(const Step& step, const KVLayout& layout, int index, int64_t slot) {
    const uint8_t* head = block_of(step, layout, index, slot);
    const int64_t element = layout.key_kind == QP_KV_F32 ? 4 : 1, offset = slot % layout.block_size * element;
    const int64_t num_bytes = layout.key_parameters, row = layout.block_size * element, stride = row < 64 ? 64 : row;
    for (int j = 0; j < layout.num_kv_heads; ++j, head += layout.head_bytes) {
        for (int64_t at = offset; at < num_bytes; at += stride) __builtin_prefetch(head + at, 1);
    }
}

bool write_heads(Step& step, const Layer& layer, const KVLayout& layout, int index, int64_t slot, const float* key) {
    const qp_kv& kv = step.kv;
    const int num_heads = layout.num_kv_heads, dim = layout.head_dim;
    const float* value = key + int64_t{num_heads} * dim;
    uint8_t* block = block_of(step, layout, index, slot);
    const int offset = static_cast<int>(slot % kv.block_size);
    bool is_marked = false;
    for (int j = 0; j < num_heads; ++j, key += dim, value += dim, block += layout.head_bytes) {
        const int64_t head = int64_t{index} * layer.sizes.num_kv_heads + j;
        is_marked |= step.plan.kernels.kv_write(layout, block, offset, key, value,
                                                kv.key_scales ? kv.key_scales[head] : 1.0f,
                                                kv.value_scales ? kv.value_scales[head] : 1.0f);
    }
    return is_marked;
}

}  // namespace

KVLayout layout_of(const Layer& layer, const qp_kv& kv) {
    return KVLayout::of(layer.sizes.num_kv_heads, layer.sizes.head_dim, kv.block_size, kv.key_kind, kv.value_kind);
}

void prepare_kinds(Step& step) {
    Plan& plan = step.plan;
    const qp_batch& batch = step.batch;
    const int64_t* contexts = batch.context_lens;
    const int64_t longest = batch.num_sequences ? *std::max_element(contexts, contexts + batch.num_sequences) : 0;
    std::vector<int64_t> positions(batch.positions, batch.positions + batch.num_tokens);
    for (LayerKind& kind : plan.kinds) {
        const bool is_narrowed = batch.window > 0 && (kind.window == 0 || batch.window < kind.window);
        kind.step_window = is_narrowed ? batch.window : kind.window;
        // Behind a window that begins where the sinks end.
        const int64_t last = int64_t{batch.num_sinks} + kind.step_window - 1;
        kind.meets_sinks = kind.step_window > 0 && batch.num_sinks > 0 && longest > last + 1;
        plan.ropes[kind.rope]->look_up(positions, kind.turns);
        if (kind.meets_sinks) {
            std::vector<int64_t> clamped(positions);
            for (int64_t& position : clamped) position = std::min(position, last);
            plan.ropes[kind.rope]->look_up(clamped, kind.sink_turns);
            plan.buffers.sink_query.grow(int64_t{batch.num_tokens} * kind.num_heads * kind.head_dim * 4);
        }
        divide_attention(step, kind);
    }
}

void place_heads(Step& step, int index) {
    Plan& plan = step.plan;
    const Layer& layer = plan.layers[index];
    const KVLayout layout = layout_of(layer, step.kv);
    const LayerKind& kind = plan.kinds[layer.kind];
    const int num_heads = kind.num_heads, num_pairs = plan.ropes[kind.rope]->num_pairs(), width = layer.qkv_width();
    const int query_width = layer.query_width();
    float *qkv = plan.buffers.qkv.as<float>(), *sink_queries = plan.buffers.sink_query.as<float>();
    for_rows(plan.threads, step.batch.num_tokens, width * kEncodeWork, [&](int first, int end) {
        bool is_marked = false;
        prefetch_keys(step, layout, index, step.batch.slots[first]);
        for (int64_t t = first; t < end; ++t) {
            if (t + 1 < end) prefetch_keys(step, layout, index, step.batch.slots[t + 1]);
            float *query = qkv + t * width, *key = query + query_width;
            norm_heads(plan.kernels, layer.query_norm, query, num_heads);
            norm_heads(plan.kernels, layer.key_norm, key, kind.num_kv_heads);
            if (kind.meets_sinks) {
                float* sink_query = sink_queries + t * query_width;
                std::copy_n(query, query_width, sink_query);
                plan.kernels.rope(sink_query, num_heads, kind.head_dim, num_pairs, kind.sink_turns[t]);
            }
            plan.kernels.rope(query, num_heads + kind.num_kv_heads, kind.head_dim, num_pairs, kind.turns[t]);
            is_marked |= write_heads(step, layer, layout, index, step.batch.slots[t], key);
        }
        if (is_marked) plan.has_written_not_finite = true;
    });
}

}  // namespace qp

// What happens to a step's queries, keys and values before attention.
//
// Shapes: T tokens, D head_dim, J KV heads.
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

bool write_heads(Step& step, const Layer& layer, const KVLayout& layout, int index, int64_t slot, const float* key) {
    const qp_kv& kv = step.kv;
    const int num_heads = layout.num_kv_heads, dim = layout.head_dim;
    const float* value = key + int64_t{num_heads} * dim;
    uint8_t* block = static_cast<uint8_t*>(kv.layers[index]) + slot / kv.block_size * layout.block_bytes;
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

void place_heads(Step& step, int index) {
    Plan& plan = step.plan;
    const Layer& layer = plan.layers[index];
    const KVLayout layout = layout_of(layer, step.kv);
    const RopeTable& rope = *plan.ropes[layer.sizes.rope];
    const int num_heads = layer.sizes.num_heads, num_kv_heads = layer.sizes.num_kv_heads, width = layer.qkv_width();
    float* qkv = plan.buffers.qkv.as<float>();
    for_rows(plan.threads, step.batch.num_tokens, width * kEncodeWork, [&](int first, int end) {
        bool is_marked = false;
        for (int64_t t = first; t < end; ++t) {
            float *query = qkv + t * width, *key = query + layer.query_width();
            norm_heads(plan.kernels, layer.query_norm, query, num_heads);
            norm_heads(plan.kernels, layer.key_norm, key, num_kv_heads);
            plan.kernels.rope(query, num_heads + num_kv_heads, layout.head_dim, rope.num_pairs(),
                              rope.at(step.batch.positions[t]));
            is_marked |= write_heads(step, layer, layout, index, step.batch.slots[t], key);
        }
        if (is_marked) plan.has_written_not_finite = true;
    });
}

}  // namespace qp

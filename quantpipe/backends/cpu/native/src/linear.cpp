#include "linear.h"

#include <algorithm>

#include "isa.h"
#include "packed_linear.h"
#include "small_floats.h"

namespace qp {
namespace {

// Rows whose activations one thread prepares at a time.
constexpr int kPreparedRows = 16;
// Pieces of work per thread: enough that a thread which comes late takes its share, few enough to claim cheaply.
constexpr int kChunksPerThread = 4;

struct Sizes {
    size_t row_bytes;
    size_t scratch_bytes;
};

Sizes sizes_of(const LinearView& view, ActivationForm form) {
    const size_t bytes_each = form == ActivationForm::floats ? 4 : form == ActivationForm::pairs ? 2 : 1;
    // An odd number of cache lines: rows a power of two apart would share few places of the first-level cache.
    const size_t num_lines = (view.k_padded * bytes_each + Aligned::kLine - 1) / Aligned::kLine;
    return {(num_lines | 1) * Aligned::kLine, std::max(kScratchBytes, view.k_padded * sizeof(float))};
}

Activations make_room(Workspace& workspace, const LinearView& view, ActivationForm form, int num_tokens,
                      int num_threads) {
    const Sizes sizes = sizes_of(view, form);
    const size_t num_groups = form == ActivationForm::floats ? 0 : view.num_groups();
    workspace.x.grow(sizes.row_bytes * num_tokens);
    workspace.scales.grow(num_groups * num_tokens * sizeof(float));
    workspace.starts.grow(num_groups * num_tokens * sizeof(int32_t));
    if (workspace.scratch.size() < size_t(num_threads)) workspace.scratch.resize(num_threads);
    for (Aligned& scratch : workspace.scratch) scratch.grow(sizes.scratch_bytes);
    return {form, workspace.x.as<uint8_t>(), sizes.row_bytes, workspace.scales.as<float>(), workspace.starts.as<int32_t>()};
}

}  // namespace

int linear_num_out(const Linear& linear) { return linear.view.n; }
int linear_num_in(const Linear& linear) { return linear.view.k; }

bool has_rows(const Linear& linear) { return !linear.view.is_integer(); }

void linear_row(const Linear& linear, int n, float* x) {
    const LinearView& view = linear.view;
    const uint8_t* lane = view.weights + n / kPanel * view.panel_bytes + n % kPanel * 4;
    if (view.kind == LinearKind::f32) {
        const auto* floats = reinterpret_cast<const float*>(lane);
        for (int k = 0; k < view.k; ++k) x[k] = floats[size_t(k) * kPanel];
        return;
    }
    const auto* halves = reinterpret_cast<const uint16_t*>(lane);
    for (int k = 0; k < view.k; ++k) x[k] = bf16_to_float(halves[size_t(k / 2) * kPanel * 2 + k % 2]);
}

Activations linear_prepare(const LinearKernels& kernels, const Linear& linear, const float* x, int64_t ldx,
                           int num_tokens, Workspace& workspace, Threads& threads) {
    const LinearView& view = linear.view;
    const Activations prepared =
        make_room(workspace, view, activation_form(view, kernels), num_tokens, threads.size());
    threads.parallel_for((num_tokens + kPreparedRows - 1) / kPreparedRows, [&](int chunk, int thread) {
        const int begin = chunk * kPreparedRows, end = std::min(begin + kPreparedRows, num_tokens);
        kernels.prepare(view, x, ldx, begin, end, prepared, workspace.scratch[thread].as<float>());
    });
    return prepared;
}

void linear_run_with(const LinearKernels& kernels, const Linear& linear, const float* x, int64_t ldx, int num_tokens,
                     float* y, int64_t ldy, Workspace& workspace, Threads& threads) {
    const LinearView& view = linear.view;
    if (num_tokens <= 0) return;
    const Activations prepared = linear_prepare(kernels, linear, x, ldx, num_tokens, workspace, threads);
    const int num_blocks = (num_tokens + kTokenBlock - 1) / kTokenBlock;
    const int wanted = threads.size() == 1 ? 1 : std::max(1, threads.size() * kChunksPerThread / num_blocks);
    const int panels_each = (view.num_panels + wanted - 1) / wanted;
    const int num_parts = (view.num_panels + panels_each - 1) / panels_each;
    threads.parallel_for(num_blocks * num_parts, [&](int chunk, int thread) {
        const int begin = chunk / num_parts * kTokenBlock, first = chunk % num_parts * panels_each;
        kernels.run(view, prepared, first, std::min(first + panels_each, view.num_panels), begin,
                    std::min(begin + kTokenBlock, num_tokens), y, ldy, workspace.scratch[thread].as<uint8_t>());
    });
}

void linear_run(const Linear& linear, const float* x, int ldx, int num_tokens, float* y, int ldy, Workspace& workspace,
                Threads& threads) {
    linear_run_with(isa().linear, linear, x, ldx, num_tokens, y, ldy, workspace, threads);
}

}  // namespace qp

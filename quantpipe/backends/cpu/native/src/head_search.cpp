#include "head_search.h"

#include <algorithm>
#include <cmath>

#include "isa.h"
#include "packed_linear.h"

namespace qp {
namespace {

// Of a piece of the vocabulary: its logits for a block of rows stay in the second-level cache.
constexpr int kPiecePanels = 16;

}  // namespace

void HeadSearch::run(const Linear& head, const float* x, int ldx, int num_rows, int32_t* best, Workspace& workspace,
                     Threads& threads) {
    const LinearKernels& kernels = isa().linear;
    const LinearView& view = head.view;
    if (num_rows <= 0) return;
    const Activations prepared = linear_prepare(kernels, head, x, ldx, num_rows, workspace, threads);
    const int num_pieces = (view.num_panels + kPiecePanels - 1) / kPiecePanels, width = kPiecePanels * kPanel;
    found_.resize(size_t(num_pieces) * num_rows);
    tiles_.resize(threads.size());
    for (Aligned& tile : tiles_) tile.grow(size_t(std::min(num_rows, kTokenBlock)) * width * sizeof(float));
    threads.parallel_for(num_pieces, [&](int piece, int thread) {
        const int panel = piece * kPiecePanels, end_panel = std::min(panel + kPiecePanels, view.num_panels);
        const int first = panel * kPanel, count = std::min(end_panel * kPanel, view.n) - first;
        float* tile = tiles_[thread].as<float>();
        for (int begin = 0; begin < num_rows; begin += kTokenBlock) {
            const int end = std::min(begin + kTokenBlock, num_rows);
            kernels.run(view, prepared, panel, end_panel, begin, end, tile - first - int64_t{begin} * width, width,
                        workspace.scratch[thread].as<uint8_t>());
            for (int row = begin; row < end; ++row) {
                found_[size_t(piece) * num_rows + row] = find(tile + int64_t{row - begin} * width, first, count);
            }
        }
    });
    for (int row = 0; row < num_rows; ++row) {
        Found most{-INFINITY, -1};
        for (int piece = 0; piece < num_pieces && most.id != kBroken; ++piece) {
            const Found& own = found_[size_t(piece) * num_rows + row];
            if (own.id == kBroken || own.logit > most.logit) most = own;
        }
        best[row] = std::max(most.id, -1);
    }
}

HeadSearch::Found HeadSearch::find(const float* logits, int first, int count) {
    const int64_t place = isa().step.argmax(logits, count);
    if (place >= 0) return {logits[place], first + static_cast<int32_t>(place)};
    const bool is_broken = std::any_of(logits, logits + count, [](float x) { return !(x < INFINITY); });
    return {-INFINITY, is_broken ? kBroken : -1};
}

int64_t HeadSearch::num_bytes() const {
    int64_t total = static_cast<int64_t>(found_.size() * sizeof(Found));
    for (const Aligned& tile : tiles_) total += static_cast<int64_t>(tile.size());
    return total;
}

}  // namespace qp

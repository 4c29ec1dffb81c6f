// Compresses a matrix in panels: codes its upper bytes, as panels.h has it. Once, when a model is loaded.

#include <numeric>

#include "panels.h"

namespace baton {
namespace {

constexpr int64_t PLAIN_WORDS = GROUP_VECTORS * VECTOR_WORDS;  // of a group
constexpr int WINDOW = 8;                                      // upper bytes of either sign that have a code
// Of a panel's words one in so many may be an exception at most: whoever multiplies it keeps the others waiting.
constexpr int64_t PANEL_EXCEPTIONS = 128;

// Without the sign.
inline int upper(uint16_t bits) { return bits >> 8 & 0x7f; }
inline bool has_code(uint16_t bits, int lowest) { return static_cast<unsigned>(upper(bits) - lowest) < WINDOW; }

// The lowest of those upper bytes that most of `words` have; `left_out` becomes the number of words that have others.
int find_lowest(const uint16_t* words, int64_t count, int64_t* left_out) {
    int64_t having[128] = {};
    for (int64_t i = 0; i < count; i++) having[upper(words[i])]++;
    int64_t inside = std::accumulate(having, having + WINDOW, int64_t{0}), most = inside;
    int best = 0;
    for (int lowest = 1; lowest + WINDOW <= 128; lowest++) {
        inside += having[lowest + WINDOW - 1] - having[lowest - 1];
        if (inside > most) most = inside, best = lowest;
    }
    *left_out = count - most;
    return best;
}

void compress_group(const uint16_t* from, int lowest, uint16_t* to) {
    auto* codes = reinterpret_cast<uint8_t*>(to);
    uint8_t* lower = codes + VECTOR_BYTES;
    constexpr int64_t RUN = TABLE_BYTES / 2;  // words whose bytes follow each other
    for (int v = 0; v < GROUP_VECTORS; v++) {
        const bool second = v >= 2;
        for (int64_t word = 0; word < VECTOR_WORDS; word += RUN) {
            const uint16_t* bits = from + v * VECTOR_WORDS + word;
            uint8_t *code = codes + byte_of(v, word), *low = lower + second * VECTOR_BYTES + byte_of(v, word);
            BATON_UNROLL for (int64_t i = 0; i < RUN; i++) {
                const int coded = code_of(bits[i], lowest);
                code[i] = static_cast<uint8_t>(second ? code[i] | coded << 4 : coded);
                low[i] = static_cast<uint8_t>(bits[i]);
            }
        }
    }
}

// A panel; its exceptions go to `to`, and the sentinel behind them.
void compress_panel(const uint16_t* from, int64_t groups, int lowest, uint16_t* compressed, Exception* to) {
    for (int64_t group = 0; group < groups; group++)
        compress_group(from + group * PLAIN_WORDS, lowest, compressed + group * 3 * VECTOR_WORDS);
    for (int64_t word = 0; word < groups * PLAIN_WORDS; word++)
        if (!has_code(from[word], lowest))
            *to++ = {static_cast<int32_t>(word / (2 * PANEL)), static_cast<uint16_t>(word % (2 * PANEL)), from[word]};
    *to = {-1, 0, 0};
}

}  // namespace
}  // namespace baton

// Compresses `plain` panels of `pairs` of inputs, a multiple of `baton_compressed_pairs()`, into `compressed`, of three
// quarters of their size, and `codes`, with room for `room` of PanelCode and Exception together. Gives how many those
// are, and 0 where they are more, or too many in one panel: then nothing is compressed.
extern "C" int64_t baton_compress_panels(const uint16_t* plain, int64_t panels, int64_t pairs, uint16_t* compressed,
                                         void* codes, int64_t room, int64_t num_threads) {
    using namespace baton;
    const int64_t words = 2 * pairs * PANEL, groups = words / PLAIN_WORDS;
    auto* panel_codes = static_cast<PanelCode*>(codes);
    auto* exceptions = reinterpret_cast<Exception*>(panel_codes + panels);
    if (room < 2 * panels) return 0;
    std::vector<int64_t> left_out(panels);
    const int threads = static_cast<int>(num_threads);
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < panels; i++) panel_codes[i].lowest = find_lowest(plain + i * words, words, &left_out[i]);
    int64_t used = 0;
    for (int64_t i = 0; i < panels; used += left_out[i++] + 1) panel_codes[i].exceptions = static_cast<int32_t>(used);
    const int64_t most = *std::max_element(left_out.begin(), left_out.end());
    if (panels + used > room || most > words / PANEL_EXCEPTIONS) return 0;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < panels; i++)
        compress_panel(plain + i * words, groups, panel_codes[i].lowest,
                       compressed + i * CompressedPanel<>::words(pairs), exceptions + panel_codes[i].exceptions);
    return panels + used;
}

// Pairs of inputs that are compressed together.
extern "C" int64_t baton_compressed_pairs() { return baton::CompressedPanel<>::PAIRS; }

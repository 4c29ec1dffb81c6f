// Holds the CPU kernels against plain loops in double, where there is no torch to hold them against: on a processor
// that is emulated. Prints the largest error of each and fails where one is too large.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

struct Matrix {  // as team.h has it
    const void* weight;
    const float *scales, *bias;
    int64_t inputs, columns;
    const void* codes;
};

extern "C" {
int64_t baton_panel_columns();
int64_t baton_compressed_pairs();
int64_t baton_compress_panels(const uint16_t*, int64_t, int64_t, uint16_t*, void*, int64_t, int64_t);
void baton_matmul_bfloat16_float32(const float*, const Matrix*, float*, int64_t, int64_t);
void baton_matmul_bfloat16_bfloat16(const uint16_t*, const Matrix*, uint16_t*, int64_t, int64_t);
void baton_paged_attention_float32_float32(const float*, const float*, const int32_t*, const int32_t*, const int32_t*, float*, int64_t,
                                           int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t, int64_t, int64_t);
void baton_paged_attention_float32_bfloat16(const float*, const uint16_t*, const int32_t*, const int32_t*, const int32_t*, float*,
                                            int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t, int64_t, int64_t);
void baton_rms_norm_float32(const float*, float*, const float*, float*, int64_t, int64_t, float, int64_t);
void baton_silu_mul_bfloat16(const uint16_t*, uint16_t*, int64_t, int64_t, int64_t);
}

namespace {

constexpr int THREADS = 2;
std::mt19937 generator(0);
bool failed = false;

float widen(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

std::vector<float> draw(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = widen(narrow(normal(generator)));  // what bfloat16 holds exactly
    return values;
}

std::vector<uint16_t> narrowed(const std::vector<float>& values) {
    std::vector<uint16_t> bits(values.size());
    std::transform(values.begin(), values.end(), bits.begin(), narrow);
    return bits;
}

void expect(const char* what, double error, double limit) {
    std::printf("%s %.2e\n", what, error);
    if (!(error <= limit)) {
        std::printf("  more than %.1e\n", limit);
        failed = true;
    }
}

void check_products() {
    double worst = 0, worst_narrow = 0;
    int different = 0, compared = 0;
    const int64_t columns_of_panel = baton_panel_columns();
    const int64_t sizes[][2] = {{1, 1}, {63, 31}, {64, 33}, {577, 70}};
    for (auto [inputs, outputs] : sizes)
        for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 25, 270}) {
            std::vector<float> x = draw(rows * inputs), weight = draw(outputs * inputs), bias = draw(outputs);
            int64_t panels = (outputs + columns_of_panel - 1) / columns_of_panel, pairs = (inputs + 1) / 2;
            std::vector<uint16_t> packed(panels * pairs * columns_of_panel * 2, narrow(1.0f));  // beyond the matrix: any
            for (int64_t o = 0; o < outputs; o++)
                for (int64_t k = 0; k < inputs; k++)
                    packed[((o / columns_of_panel * pairs + k / 2) * columns_of_panel + o % columns_of_panel) * 2 + k % 2] =
                        narrow(weight[o * inputs + k]);
            std::vector<float> out(rows * outputs);
            std::vector<uint16_t> out_narrow(rows * outputs), x_narrow = narrowed(x);
            const Matrix matrix{packed.data(), nullptr, bias.data(), inputs, outputs, nullptr};
            baton_matmul_bfloat16_float32(x.data(), &matrix, out.data(), rows, THREADS);
            baton_matmul_bfloat16_bfloat16(x_narrow.data(), &matrix, out_narrow.data(), rows, THREADS);
            if (pairs % baton_compressed_pairs() == 0) {
                std::vector<uint16_t> compressed(packed.size() * 3 / 4);
                std::vector<uint64_t> codes(2 * panels + packed.size());
                const int64_t used = baton_compress_panels(packed.data(), panels, pairs, compressed.data(), codes.data(),
                                                           codes.size(), THREADS);
                if (!used) continue;
                const Matrix same{compressed.data(), nullptr, bias.data(), inputs, outputs, codes.data()};
                std::vector<float> again(out.size());
                std::vector<uint16_t> again_narrow(out.size());
                baton_matmul_bfloat16_float32(x.data(), &same, again.data(), rows, THREADS);
                baton_matmul_bfloat16_bfloat16(x_narrow.data(), &same, again_narrow.data(), rows, THREADS);
                different += again != out || again_narrow != out_narrow;
                compared++;
            }
            for (int64_t r = 0; r < rows; r++)
                for (int64_t o = 0; o < outputs; o++) {
                    double sum = bias[o];
                    for (int64_t k = 0; k < inputs; k++)
                        sum += static_cast<double>(x[r * inputs + k]) * weight[o * inputs + k];
                    double scale = std::sqrt(inputs) + std::fabs(sum);
                    worst = std::max(worst, std::fabs(out[r * outputs + o] - sum) / scale);
                    worst_narrow = std::max(worst_narrow, std::fabs(widen(out_narrow[r * outputs + o]) - sum) / scale);
                }
        }
    expect("product, float32", worst, 2e-6);
    expect("product, bfloat16", worst_narrow, 4e-3);
    expect("product, compressed: results that differ", different + (compared == 0), 0);
}

// Rows of (context, new tokens) over pages in any order.
void check_attention(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window) {
    const int64_t rows[][2] = {{1, 1}, {17, 1}, {64, 64}, {130, 1}, {200, 70}, {65, 3}}, block = 16;
    int64_t num_rows = std::size(rows), width = 13, tokens = 0;
    std::vector<int32_t> starts{0}, contexts, tables(num_rows * width);
    for (auto [context, added] : rows) {
        contexts.push_back(static_cast<int32_t>(context));
        starts.push_back(static_cast<int32_t>(tokens += added));
    }
    for (size_t i = 0; i < tables.size(); i++) tables[i] = static_cast<int32_t>(i);
    std::shuffle(tables.begin(), tables.end(), generator);
    std::vector<float> query = draw(tokens * heads * head_dim);
    std::vector<float> pages = draw(num_rows * width * kv_heads * 2 * block * head_dim);
    std::vector<uint16_t> pages_narrow = narrowed(pages);
    std::vector<float> out(query.size()), out_narrow(query.size());
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    baton_paged_attention_float32_float32(query.data(), pages.data(), starts.data(), contexts.data(), tables.data(), out.data(), num_rows,
                                          heads, kv_heads, head_dim, block, width, scale, window, 0, THREADS);
    baton_paged_attention_float32_bfloat16(query.data(), pages_narrow.data(), starts.data(), contexts.data(), tables.data(),
                                           out_narrow.data(), num_rows, heads, kv_heads, head_dim, block, width, scale, window, 0, THREADS);
    double worst = 0, worst_narrow = 0;
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t token = 0; token < rows[row][1]; token++)
            for (int64_t head = 0; head < heads; head++) {
                int64_t position = rows[row][0] - rows[row][1] + token, at = ((starts[row] + token) * heads + head) * head_dim;
                int64_t first = std::max<int64_t>(0, position - window + 1);
                auto line = [&](int64_t key, int64_t half) {
                    int64_t page = tables[row * width + key / block], kv_head = head / (heads / kv_heads);
                    return pages.data() + (((page * kv_heads + kv_head) * 2 + half) * block + key % block) * head_dim;
                };
                std::vector<double> weights, sums(head_dim, 0.0);
                double total = 0;
                for (int64_t key = first; key <= position; key++) {
                    double dot = 0;
                    for (int64_t d = 0; d < head_dim; d++) dot += static_cast<double>(query[at + d]) * line(key, 0)[d];
                    weights.push_back(std::exp(dot * scale));
                    total += weights.back();
                }
                for (int64_t key = first; key <= position; key++)
                    for (int64_t d = 0; d < head_dim; d++) sums[d] += weights[key - first] / total * line(key, 1)[d];
                for (int64_t d = 0; d < head_dim; d++) {
                    worst = std::max(worst, std::fabs(out[at + d] - sums[d]));
                    worst_narrow = std::max(worst_narrow, std::fabs(out_narrow[at + d] - sums[d]));
                }
            }
    char name[64];
    std::snprintf(name, sizeof name, "attention, %d heads of %d", static_cast<int>(heads), static_cast<int>(head_dim));
    expect(name, worst, 2e-5);
    expect("  pages of bfloat16", worst_narrow, 2e-5);
}

void check_small() {
    const int64_t tokens = 3, hidden = 577;
    std::vector<float> x = draw(tokens * hidden), weight = draw(hidden), out(x.size());
    baton_rms_norm_float32(x.data(), nullptr, weight.data(), out.data(), tokens, hidden, 1e-5f, THREADS);
    double worst = 0;
    for (int64_t t = 0; t < tokens; t++) {
        double squares = 0;
        for (int64_t i = 0; i < hidden; i++) squares += static_cast<double>(x[t * hidden + i]) * x[t * hidden + i];
        for (int64_t i = 0; i < hidden; i++)
            worst = std::max(worst, std::fabs(out[t * hidden + i] - x[t * hidden + i] / std::sqrt(squares / hidden + 1e-5) * weight[i]));
    }
    expect("norm", worst, 1e-5);
    std::vector<float> both = draw(tokens * 2 * hidden);
    std::vector<uint16_t> both_narrow = narrowed(both), gated(tokens * hidden);
    baton_silu_mul_bfloat16(both_narrow.data(), gated.data(), tokens, hidden, THREADS);
    worst = 0;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < hidden; i++) {
            double gate = both[t * 2 * hidden + i], up = both[t * 2 * hidden + hidden + i];
            double wanted = gate / (1 + std::exp(-gate)) * up;
            worst = std::max(worst, std::fabs(widen(gated[t * hidden + i]) - wanted) / (1 + std::fabs(wanted)));
        }
    expect("gate, bfloat16", worst, 4e-3);
}

}  // namespace

int main() {
    check_products();
    check_attention(4, 4, 16, 1 << 30);
    check_attention(9, 3, 64, 1 << 30);
    check_attention(8, 2, 80, 33);
    check_small();
    return failed;
}

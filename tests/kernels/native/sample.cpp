// Drawing tokens, against a sampler that sorts and computes in double precision.
#include <algorithm>
#include <numeric>

#include "check.h"

namespace {

struct Settings {
  double temperature = 1;
  int32_t top_k = 0;
  double top_p = 1, min_p = 0;
  uint64_t seed = 0, counter = 0;
};

uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
uint32_t fmix32(uint32_t h) {
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return h ^ (h >> 16);
}
double noise(const Settings &s, int64_t token) {
  const uint64_t key = splitmix64(s.seed ^ splitmix64(s.counter));
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  uint32_t h = fmix32((static_cast<uint32_t>(token) * 0x9E3779B1u + static_cast<uint32_t>(key)) ^ high);
  h = fmix32(h + high);
  return -std::log(-std::log(((h >> 9) + 0.5) * 0x1p-23));
}

// Which tokens pass the filters. Those that tie with the last one all do, except of top-p: there only as many
// as reach its share, the lowest ids first.
std::vector<bool> kept(const float *logits, int64_t vocab, const Settings &s) {
  std::vector<int64_t> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  const double top = logits[order[0]];
  double floor = -INFINITY;
  if (s.top_k > 0 && s.top_k < vocab) floor = logits[order[s.top_k - 1]];
  const auto weight = [&](int64_t i) { return std::exp((logits[i] - top) / static_cast<float>(s.temperature)); };
  int64_t count = vocab;  // of `order`
  if (s.top_p < 1) {
    double total = 0, sum = 0;
    for (int64_t i : order)
      if (logits[i] >= floor) total += weight(i);
    for (int64_t n = 0; n < vocab; ++n) {
      sum += weight(order[n]);
      if (sum >= static_cast<float>(s.top_p) * total * (1 - 1e-15)) {
        count = n + 1;
        break;
      }
    }
  }
  std::vector<bool> keep(vocab);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = order[n];
    keep[i] = logits[i] >= floor && std::isfinite(logits[i]) && weight(i) >= static_cast<float>(s.min_p);
  }
  return keep;
}

int64_t expected(const float *logits, int64_t vocab, const Settings &s) {
  int64_t best = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  if (std::isinf(logits[best])) return -1;
  if (s.temperature == 0) return best;
  const std::vector<bool> keep = kept(logits, vocab, s);
  const double top = logits[best];
  double most = -INFINITY;
  for (int64_t i = 0; i < vocab; ++i)
    if (keep[i]) {
      const double y = (logits[i] - top) / static_cast<float>(s.temperature) + noise(s, i);
      if (y > most) most = y, best = i;
    }
  return best;
}

std::vector<int64_t> draw(const Array &logits, int64_t vocab, int64_t stride, const std::vector<Settings> &settings) {
  std::vector<float> temperature, top_p, min_p;
  std::vector<int32_t> top_k;
  std::vector<uint64_t> seed, counter;
  for (const Settings &s : settings) {
    temperature.push_back(static_cast<float>(s.temperature));
    top_k.push_back(s.top_k);
    top_p.push_back(static_cast<float>(s.top_p));
    min_p.push_back(static_cast<float>(s.min_p));
    seed.push_back(s.seed);
    counter.push_back(s.counter);
  }
  std::vector<int64_t> out(settings.size(), -7);
  octavo_sample(out.data(), logits.floats(), static_cast<int64_t>(settings.size()), vocab, stride, temperature.data(),
                top_k.data(), top_p.data(), min_p.data(), seed.data(), counter.data());
  return out;
}

Settings some(Random &random, int64_t vocab) {
  const double temperatures[] = {0, 0.3, 0.7, 1, 1.5, 5}, top_ps[] = {1, 1, 0, 1e-6, 0.1, 0.5, 0.9, 0.999};
  const double min_ps[] = {0, 0, 0, 1e-4, 0.05, 0.5, 1};
  const int64_t top_ks[] = {0, 0, 1, 2, 5, 40, vocab / 2, vocab, 10 * vocab};
  return {temperatures[random.below(6)], static_cast<int32_t>(top_ks[random.below(9)]), top_ps[random.below(8)],
          min_ps[random.below(7)], random.bits(), random.bits() >> 24};
}

}  // namespace

void test_sample(Report &r) {
  for (int64_t vocab : {1, 2, 15, 17, 333, 5003}) {
    Random random(31 + vocab);
    const int64_t rows = vocab > 1000 ? 12 : 40, stride = vocab + 3;
    for (double scale : {0.01, 1.0, 4.0}) {
      Array logits = Array::normal(random, rows * stride, OCTAVO_F32, scale);
      if (vocab == 333)  // ties, masked tokens, rows with nothing to draw
        for (int64_t i = 0; i < rows * stride; ++i) {
          const int64_t dice = random.below(10);
          const bool odd = i / stride >= rows - 3;
          logits.set(i, dice < 2 ? -INFINITY : dice < 3 ? -1e9 : std::nearbyint(logits[i] * 2));
          if (odd) logits.set(i, i / stride == rows - 1 ? -INFINITY : i % stride == 20 ? (i / stride == rows - 2 ? NAN : INFINITY) : 0);
        }
      std::vector<Settings> settings;
      for (int64_t i = 0; i < rows; ++i) settings.push_back(some(random, vocab));
      const std::vector<int64_t> got = draw(logits, vocab, stride, settings);
      for (int64_t i = 0; i < rows; ++i) {
        const Settings &s = settings[i];
        const int64_t want = expected(logits.floats() + i * stride, vocab, s);
        r.that(got[i] == want, "token %lld, not %lld, of %lld: T %g, top_k %d, top_p %g, min_p %g",
               static_cast<long long>(got[i]), static_cast<long long>(want), static_cast<long long>(vocab),
               s.temperature, s.top_k, s.top_p, s.min_p);
        const std::vector<int64_t> alone = [&] {
          Array row(vocab);
          std::memcpy(row.data(), logits.at(i * stride), row.bytes());
          return draw(row, vocab, vocab, {s});
        }();
        r.that(alone[0] == got[i], "a row alone draws another token");
      }
      r.drew(got);
    }
  }
}

// Frequencies over many counters are those of the softmax: chi-squared, 7 degrees of freedom.
void test_sample_distribution(Report &r) {
  const int64_t vocab = 8, rows = 4000;
  Array logits(rows * vocab);
  for (int64_t i = 0; i < rows * vocab; ++i) logits.set(i, std::log(1.0 + i % vocab));
  std::vector<Settings> settings(rows);
  for (int64_t i = 0; i < rows; ++i) settings[i].seed = 5, settings[i].counter = static_cast<uint64_t>(i);
  int64_t count[vocab] = {};
  for (int64_t id : draw(logits, vocab, vocab, settings)) ++count[id];
  double chi = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    const double want = rows * (i + 1.0) / 36;
    chi += (count[i] - want) * (count[i] - want) / want;
  }
  r.that(chi < 24.3 /* 1 in 1000 */ && chi > 0.3, "chi-squared is %g", chi);
}

void test_logprobs(Report &r) {
  Random random(33);
  for (int64_t vocab : {1, 5, 64, 333, 12000}) {
    const int64_t rows = 6, stride = vocab + 1;
    Array logits = Array::normal(random, rows * stride, OCTAVO_F32, 4);
    for (int64_t i = 0; i < rows * stride; i += 7) logits.set(i, std::nearbyint(logits[i]));
    std::vector<int64_t> ids(rows), rank(rows);
    for (int64_t &id : ids) id = random.below(vocab);
    Array logprob(rows), logsumexp(rows);
    r.that(!octavo_token_logprobs(logprob.floats(), rank.data(), logsumexp.floats(), logits.floats(), ids.data(), rows,
                                  vocab, stride), "status");
    for (int64_t b = 0; b < rows; ++b) {
      double top = -INFINITY, sum = 0;
      int64_t larger = 0;
      for (int64_t i = 0; i < vocab; ++i) top = std::fmax(top, logits[b * stride + i]);
      for (int64_t i = 0; i < vocab; ++i) {
        sum += std::exp(logits[b * stride + i] - top);
        larger += logits[b * stride + i] > logits[b * stride + ids[b]];
      }
      r.near(logsumexp[b], top + std::log(sum), 1e-6, 1e-6, "logsumexp", b);
      r.near(logprob[b], logits[b * stride + ids[b]] - top - std::log(sum), 1e-6, 2e-6, "logprob", b);
      r.that(rank[b] == larger + 1, "rank %lld, not %lld", static_cast<long long>(rank[b]), static_cast<long long>(larger + 1));
    }
    r.saw(logprob);
  }
}

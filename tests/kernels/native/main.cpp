// Runs the tests on every variant that this CPU can run.
//
// native_tests [--chosen] [--expect VARIANT] [--best] [--only TEST]...
//   --chosen  print the variant that the library chooses by itself, and do nothing
//   --expect  fail unless VARIANT is the chosen one
//   --best    only the chosen variant
// Prints a line per variant: "passed" or "FAILED", its name, the number of checks, a digest of what the
// sampler drew (which is the same on every CPU). The exit status is 1 if a check failed.
#include <cstdlib>
#include <sstream>

#include "check.h"

namespace {

const struct Test {
  const char *name;
  void (*run)(Report &);
} kTests[] = {
    {"conversions", test_conversions}, {"norms", test_norms}, {"rotary", test_rotary},
    {"activations", test_activations}, {"write_kv", test_write_kv}, {"blocks", test_blocks},
    {"attention", test_attention}, {"attention_company", test_attention_company}, {"packing", test_packing},
    {"products", test_products}, {"products_of_codes", test_products_of_codes}, {"exact_products", test_exact_products}, {"product_company", test_product_company},
    {"odd_numbers", test_odd_numbers}, {"sample", test_sample}, {"sample_distribution", test_sample_distribution},
    {"logprobs", test_logprobs}, {"decoder_layer", test_decoder_layer},
    {"decoder_layers", test_decoder_layers}, {"threads", test_threads},
};

Report run(const std::vector<std::string> &only) {
  Report total;
  for (const Test &test : kTests) {
    bool wanted = only.empty();
    for (const std::string &name : only) wanted |= name == test.name;
    if (!wanted) continue;
    uint64_t digest = 0;
    for (int threads : {1, 2, 4}) {
      octavo_set_threads(threads, 200);
      Report r;
      r.start(test.name);
      test.run(r);
      if (threads == 1) digest = r.digest;
      r.that(r.digest == digest, "other bits than with 1 thread");
      total.checks += r.checks;
      total.failures += r.failures;
      if (threads == 1) total.tokens ^= r.tokens;
      if (test.run == test_threads) break;  // it chooses its own numbers of threads
    }
  }
  return total;
}

}  // namespace

int main(int argc, char **argv) {
  std::vector<std::string> only;
  std::string expect, variants = octavo_isas();
  const std::string chosen = octavo_isa();
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--chosen") return std::printf("%s\n", chosen.c_str()), 0;
    if (option == "--best") variants = chosen;
    else if (option == "--expect" && i + 1 < argc) expect = argv[++i];
    else if (option == "--only" && i + 1 < argc) only.push_back(argv[++i]);
    else return std::fprintf(stderr, "usage: %s [--expect VARIANT] [--best] [--only TEST]...\n", argv[0]), 2;
  }
  if (octavo_abi_version() != OCTAVO_CPU_ABI) return std::printf("ABI %d\n", octavo_abi_version()), 1;
  if (!expect.empty() && expect != chosen)
    return std::printf("the library chose %s, not %s\n", chosen.c_str(), expect.c_str()), 1;
  if (octavo_force_isa("mmx") != OCTAVO_BAD_ARGUMENT) return std::printf("it takes any variant\n"), 1;
  int64_t failures = 0;
  std::istringstream names(variants);
  for (std::string name; names >> name;) {
    if (octavo_force_isa(name.c_str()) || name != octavo_isa()) return std::printf("%s cannot be forced\n", name.c_str()), 1;
    const Report r = run(only);
    failures += r.failures;
    std::printf("%s %s %lld %016llx\n", r.failures ? "FAILED" : "passed", name.c_str(), static_cast<long long>(r.checks),
                static_cast<unsigned long long>(r.tokens));
    std::fflush(stdout);
  }
  return failures ? 1 : 0;
}

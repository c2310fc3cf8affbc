#!/usr/bin/env bash
# The papers' experiments on local SGD, simulated one after another on text in runs/c4 (recipes/c4_lm/README.md). A second
# call goes on where the first was stopped. Results:
# runs/outer_rules/NAME.json, and runs/simulate/ranks. About 19 hours on one core, half of that on two.
set -euo pipefail
. "$(dirname "$0")/environment.sh"  # also changes into the project
if [ ! -d runs/c4 ]; then
    python recipes/c4_lm/corpus_made_up.py runs/c4
fi
fairseq-async simulate recipes/paper/ranks.yaml --resume
grid() {
    name=$1
    shift
    python scripts/bench/outer_rules.py "recipes/paper/$name.yaml" --out "runs/outer_rules/$name" \
        --json "runs/outer_rules/$name.json" --processes "$(nproc)" "$@"
}
grid outer_rules
grid outer_recommended --rates 1
grid outer_rules_from_scratch --scheduling none
grid outer_rules_sources --scheduling none
grid outer_optimizers --scheduling none
grid inner_optimizers --scheduling none
grid baselines --scheduling none
grid fragments --scheduling none
grid compression_rates --scheduling "grace and dynamic steps" --grace 0.3
grid workers --scheduling "none,grace and dynamic steps"
grid heterogeneity

#!/usr/bin/env bash
# A server with every part that this model and this machine can run: serve.sh TARGET DRAFT [flags of vllm serve]
# Ask it with: python client.py
set -euo pipefail
target=${1:?usage: serve.sh TARGET DRAFT [flags of vllm serve]}
draft=${2:?usage: serve.sh TARGET DRAFT [flags of vllm serve]}

exec vllm serve "$target" \
    --speculative-config "{\"method\": \"eagle3\", \"model\": \"$draft\", \"num_speculative_tokens\": 7}" \
    --additional-config.graft auto \
    "${@:3}"

#!/bin/sh
# The short form of scripts/eval.sh mmlu.
exec sh "$(dirname -- "$0")/eval.sh" mmlu "$@"

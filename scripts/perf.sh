#!/bin/sh
# Measures latency and throughput of a served gpt-oss with `evalscope perf`, as the Ascend article does.
set -eu
program=perf.sh
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$here/lib.sh"

usage() {
    cat <<'END'
usage: scripts/perf.sh [options] [-- flags of evalscope perf]

Measures a running server with evalscope perf: random prompts of 128 tokens, answers of 128 tokens (ignore_eos), one
request at a time and ten at a time. Then prints a table with its definitions and the Ascend article's numbers. What
evalscope says goes to evalscope.log in the folder of the results.

  --url URL              the server; default http://127.0.0.1:8085
  --model NAME           the served model; default the only one there
  --tokenizer DIR        a checkpoint's folder with its tokenizer; default the one that the server names
  --parallel LIST        requests at a time, one run each; default 1,10
  --number LIST          requests in each run; default 10,20
  --input N              tokens of a prompt, chat template included; default 128
  --output N             tokens of an answer; default 128
  --out DIR              where the results go; default outputs/perf-NAME-TIME
  --dry-run              print the command, run nothing
  --help                 this text

Needs evalscope: make setup-evalscope.
END
}

url=http://127.0.0.1:8085 model='' tokenizer='' parallel=1,10 requests=10,20 input=128 output=128 out='' dry=''
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) usage && exit 0 ;;
    --dry-run) dry=1 && shift && continue ;;
    --) shift && break ;;
    --url | --model | --tokenizer | --parallel | --number | --input | --output | --out) value "$1" $# ;;
    *) fail "there is no option $1; --help lists them, and flags of evalscope perf go after --." ;;
    esac
    case $1 in
    --url) url=$2 ;;
    --model) model=$2 ;;
    --tokenizer) tokenizer=$2 ;;
    --parallel) numbers "$1" "$2" && parallel=$2 ;;
    --number) numbers "$1" "$2" && requests=$2 ;;
    --input) number "$1" "$2" && input=$2 ;;
    --output) number "$1" "$2" && output=$2 ;;
    --out) out=$2 ;;
    esac
    shift 2
done
[ "$(printf %s "$parallel" | tr -dc , | wc -c)" = "$(printf %s "$requests" | tr -dc , | wc -c)" ] ||
    fail "--parallel $parallel and --number $requests are lists of different lengths."
url=${url%/} && url=${url%/v1}

find_evalscope "$here"
if [ -z "$dry" ] || [ -z "$model" ] || [ -z "$tokenizer" ]; then
    ask_server "$here" "$url" "$model"
    [ -n "$tokenizer" ] || tokenizer=$folder
    [ -f "$tokenizer/tokenizer.json" ] || fail "the server's checkpoint '$tokenizer' has no tokenizer.json on this \
machine; name a folder that has it with --tokenizer."
    [ -z "$longest" ] || [ $((input + output)) -le "$longest" ] || fail "--input $input and --output $output are more \
than the $longest tokens of the server's --max-model-len."
fi
[ -n "$out" ] || out=outputs/perf-$model-$(date +%Y%m%d-%H%M%S)

# shellcheck disable=SC2046  # lists of numbers, meant to be split
set -- "$evalscope" perf --model "$model" --url "$url/v1/chat/completions" --api openai --dataset random \
    --parallel $(printf %s "$parallel" | tr , ' ') --number $(printf %s "$requests" | tr , ' ') \
    --prefix-length 0 --min-prompt-length "$input" --max-prompt-length "$input" \
    --min-tokens "$output" --max-tokens "$output" --extra-args '{"ignore_eos": true}' \
    --tokenizer-path "$tokenizer" --outputs-dir "$out" --no-timestamp "$@"
# evalscope's libraries look things up on hubs; all that is needed is here
set -- env HF_HUB_OFFLINE=1 "$@"
quoted "$@"
[ -z "$dry" ] || exit 0
[ ! -e "$out" ] || fail "$out exists already; name another folder with --out."
log=$out/evalscope.log
mkdir -p "$out"
{ "$@" && status=0 || status=$?; printf '\nexit %s\n' "$status"; } 2>&1 | "$python" "$here/perf_report.py" "$log" --follow
exec "$python" "$here/perf_report.py" "$out" --output "$output"

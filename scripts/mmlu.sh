#!/bin/sh
# Measures a served gpt-oss on MMLU with `evalscope eval`, as the Ascend article does; docs/accuracy.md explains it.
set -eu
program=mmlu.sh
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$here/lib.sh"

usage() {
    cat <<'END'
usage: scripts/mmlu.sh [options] [-- flags of evalscope eval]

Asks a running server the questions of MMLU (all 57 subjects, 14 042 questions) at temperature 0 with evalscope eval,
then prints the report. Interrupted, the same command goes on where it stopped.

  --url URL              the server; default http://127.0.0.1:8085
  --model NAME           the served model; default the only one there
  --gate                 1 000 questions instead, drawn from all subjects in proportion, always the same ones
  --limit N              the first N questions of each subject (a trial; not with --gate)
  --effort EFFORT        reasoning effort: low, medium or high; default medium
  --batch N              requests at a time; default 16
  --few-shot N           worked examples before each question, 0 to 5; default 5
  --max-tokens N         tokens of an answer, reasoning included; default what the server allows
  --data DIR             MMLU on this machine: a folder as on the hub (cais/mmlu); default evalscope downloads it
  --out DIR              where answers and reports go; default outputs/mmlu-NAME-EFFORT, with -gate or -limitN
  --dry-run              print the command, run nothing
  --help                 this text

Needs evalscope: make setup-evalscope. The report again, or against another run:
python3 scripts/mmlu_report.py --help.
END
}

# int(size of the subject * PART), which is what evalscope takes, summed over MMLU's 57 subjects, is exactly 1000
PART=0.0732

url=http://127.0.0.1:8085 model='' gate='' limit='' effort=medium batch=16 shots=5 tokens='' data='' out='' dry=''
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) usage && exit 0 ;;
    --dry-run) dry=1 && shift && continue ;;
    --gate) gate=1 && shift && continue ;;
    --) shift && break ;;
    --url | --model | --limit | --effort | --batch | --few-shot | --max-tokens | --data | --out) value "$1" $# ;;
    *) fail "there is no option $1; --help lists them, and flags of evalscope eval go after --." ;;
    esac
    case $1 in
    --url) url=$2 ;;
    --model) model=$2 ;;
    --limit) number "$1" "$2" && limit=$2 ;;
    --effort)
        case $2 in low | medium | high) ;; *) fail "--effort wants low, medium or high, got '$2'." ;; esac
        effort=$2
        ;;
    --batch) number "$1" "$2" && batch=$2 ;;
    --few-shot)
        case $2 in [0-5]) ;; *) fail "--few-shot wants 0 to 5, got '$2': MMLU has five examples for a subject." ;; esac
        shots=$2
        ;;
    --max-tokens) number "$1" "$2" && tokens=$2 ;;
    --data) data=$2 ;;
    --out) out=$2 ;;
    esac
    shift 2
done
[ -z "$gate" ] || [ -z "$limit" ] || fail "--gate and --limit exclude each other."
url=${url%/} && url=${url%/v1}

source=''
if [ -n "$data" ]; then
    [ -d "$data" ] || fail "--data $data is not a folder."
    [ -f "$data/README.md" ] || fail "--data $data has no README.md: expected the folder of cais/mmlu as it is on the \
hub, whose README.md names its files (docs/accuracy.md shows a small one)."
    data=$(CDPATH='' cd -- "$data" && pwd)
    case $data in *[\"\\]*) fail "--data $data: a quote or backslash in the path cannot be handed to evalscope." ;; esac
    source=", \"local_path\": \"$data\""
fi
find_evalscope "$here"
[ -n "$dry" ] && [ -n "$model" ] || ask_server "$here" "$url" "$model"
if [ -z "$out" ]; then
    out=outputs/mmlu-$model-$effort
    [ -z "$gate" ] || out=$out-gate
    [ -z "$limit" ] || out=$out-limit$limit
fi

set -- --work-dir "$out" --no-timestamp "$@"
# evalscope resumes only with the settings of before; where nothing is answered yet, others may be tried
! any_file "$out"/predictions/*/mmlu_*.jsonl || set -- --use-cache "$out" "$@"
shuffle=''
if [ -n "$gate" ]; then
    shuffle=', "shuffle": true'
    set -- --limit "$PART" "$@"
elif [ -n "$limit" ]; then
    set -- --limit "$limit" "$@"
fi
most=''
[ -z "$tokens" ] || most=", \"max_tokens\": $tokens"
# an answer of many thousand tokens takes longer than the ten minutes that the client would wait
set -- "$evalscope" eval --model "$model" --api-url "$url/v1" --api-key EMPTY --eval-type openai_api --datasets mmlu \
    --dataset-args "{\"mmlu\": {\"few_shot_num\": $shots$shuffle$source}}" \
    --generation-config "{\"temperature\": 0, \"reasoning_effort\": \"$effort\"$most, \"timeout\": 3600}" \
    --eval-batch-size "$batch" --seed 42 "$@"
[ -z "$data" ] || set -- env HF_HUB_OFFLINE=1 "$@"
quoted "$@"
[ -z "$dry" ] || exit 0
hint=''
[ -n "$data" ] || hint='
If it could not download MMLU: get the folder of cais/mmlu onto this machine and name it with --data.'
"$@" || fail "evalscope did not finish (its last lines say why); what is answered is kept in $out, and the same command
goes on from there. If it says that the identity does not match: $out holds a run with other settings or of another
address; name another folder with --out.$hint"
exec "$python" "$here/mmlu_report.py" "$out"

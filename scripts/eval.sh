#!/bin/sh
# Measures a served gpt-oss on a benchmark with `evalscope eval`; docs/accuracy.md explains it. mmlu.sh is `eval.sh mmlu`.
set -eu
program=eval.sh
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$here/lib.sh"

usage() {
    cat <<'END'
usage: scripts/eval.sh BENCHMARK [options] [-- flags of evalscope eval]
       scripts/mmlu.sh [options] [-- flags of evalscope eval]      (the same as scripts/eval.sh mmlu)

Asks a running server the questions of a benchmark at temperature 0 with evalscope eval, then prints the report.
Interrupted, the same command goes on where it stopped. BENCHMARK is one of
  mmlu      MMLU, all 57 subjects, 14 042 questions
  gsm8k     GSM8K, 1 319 questions
  gpqa      GPQA Diamond, 198 questions
  aime25    AIME 2025, 30 questions

  --url URL              the server; default http://127.0.0.1:8085
  --model NAME           the served model; default the only one there
  --gate                 MMLU: 1 000 questions, drawn from all subjects in proportion, always the same ones
  --limit N              the first N questions, in MMLU of each subject (a trial; not with --gate)
  --effort EFFORT        reasoning effort: low, medium or high; default medium
  --batch N              requests at a time; default 16
  --few-shot N           worked examples before each question; default 5 in MMLU, 4 in GSM8K, else 0
  --max-tokens N         tokens of an answer, reasoning included; default what the server allows. An answer that is
                         cut off counts as wrong: the report counts these
  --data DIR             the questions on this machine; default evalscope downloads them. A folder as on the hub:
                         cais/mmlu, openai/gsm8k, math-ai/aime25; GPQA: a folder with gpqa_diamond.csv and no more
  --out DIR              where answers and reports go; default outputs/BENCHMARK-NAME-EFFORT, with -gate or -limitN
  --dry-run              print the command, run nothing
  --help                 this text

Needs evalscope: make setup-evalscope. The report again, or against another run:
python3 scripts/eval_report.py --help.
END
}

# int(size of the subject * PART), which is what evalscope takes, summed over MMLU's 57 subjects, is exactly 1000
PART=0.0732
# what a thought at high effort may take: with 32 768 tokens 4 or 5 answers of 30 in AIME 2025 were cut (docs/accuracy.md)
LONG=65536

benchmark='' url=http://127.0.0.1:8085 model='' gate='' limit='' effort=medium batch=16 shots='' tokens='' data='' out='' dry=''
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) usage && exit 0 ;;
    --dry-run) dry=1 && shift && continue ;;
    --gate) gate=1 && shift && continue ;;
    --) shift && break ;;
    mmlu | gsm8k | gpqa | aime25)
        [ -z "$benchmark" ] || fail "one benchmark at a time: $benchmark or $1."
        benchmark=$1 && shift && continue
        ;;
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
    --few-shot) shots=$2 ;;
    --max-tokens) number "$1" "$2" && tokens=$2 ;;
    --data) data=$2 ;;
    --out) out=$2 ;;
    esac
    shift 2
done
# evalscope's name of it, its examples: the default, a pattern of what it has, in words; the file without which a folder
# is not the hub's
case $benchmark in
mmlu) set -- mmlu 5 '[0-5]' '0 to 5' README.md "$@" ;;
gsm8k) set -- gsm8k 4 '[0-8]' '0 to 8' README.md "$@" ;;
gpqa) set -- gpqa_diamond 0 '[05]' '0 or 5' gpqa_diamond.csv "$@" ;;
aime25) set -- aime25 0 0 0 '' "$@" ;;
'') fail "name what to ask: mmlu, gsm8k, gpqa or aime25; --help explains them." ;;
esac
dataset=$1 shots=${shots:-$2}
# shellcheck disable=SC2254  # a pattern is meant
case $shots in $3) ;; *) fail "--few-shot wants $4, got '$shots': $benchmark has no other examples." ;; esac
if [ -n "$data" ]; then
    [ -d "$data" ] || fail "--data $data is not a folder."
    [ -z "$5" ] || [ -f "$data/$5" ] || fail "--data $data has no $5: expected the folder of the hub, or one like it \
(docs/accuracy.md shows what belongs into it)."
    data=$(CDPATH='' cd -- "$data" && pwd)
    case $data in *[\"\\]*) fail "--data $data: a quote or backslash in the path cannot be handed to evalscope." ;; esac
fi
shift 5
[ -z "$gate" ] || [ "$benchmark" = mmlu ] || fail "--gate is a choice of MMLU's questions; $benchmark takes --limit N."
[ -z "$gate" ] || [ -z "$limit" ] || fail "--gate and --limit exclude each other."
url=${url%/} && url=${url%/v1}

find_evalscope "$here"
longest=''
[ -n "$dry" ] && [ -n "$model" ] || ask_server "$here" "$url" "$model"
if [ "$effort" = high ] && [ -n "$longest" ] && [ "${tokens:-$longest}" -lt "$LONG" ]; then
    say "an answer ends after ${tokens:-$longest} tokens. At high effort thoughts get longer; start the server with \
--max-model-len $LONG where its memory allows. The report counts what was cut."
fi
named=$out
if [ -z "$out" ]; then
    out=outputs/$benchmark-$model-$effort
    [ -z "$gate" ] || out=$out-gate
    [ -z "$limit" ] || out=$out-limit$limit
fi
# evalscope goes on with the answers of the same address alone
asked=$(sed -n 's/^api_url: *//p' "$out/configs/task_config.yaml" 2>/dev/null || true)
if [ -n "$asked" ] && [ "$asked" != "$url/v1" ]; then
    [ -z "$named" ] || fail "$out holds answers of $asked, and this server is $url/v1; name another folder with --out."
    say "$out holds answers of $asked; this run gets a folder of its own."
    out=$out-$(printf %s "${url#*://}" | tr -c 'A-Za-z0-9._\n-' -)
fi

set -- --work-dir "$out" --no-timestamp "$@"
# evalscope resumes only with the settings of before; where nothing is answered yet, others may be tried
! any_file "$out"/predictions/*/"$dataset"_*.jsonl || set -- --use-cache "$out" "$@"
drawn=''
if [ -n "$gate" ]; then
    drawn=', "shuffle": true'
    set -- --limit "$PART" "$@"
elif [ -n "$limit" ]; then
    set -- --limit "$limit" "$@"
fi
source=''
[ -z "$data" ] || source=", \"local_path\": \"$data\""
most=''
[ -z "$tokens" ] || most=", \"max_tokens\": $tokens"
# an answer of many thousand tokens takes longer than the ten minutes that the client would wait
set -- "$evalscope" eval --model "$model" --api-url "$url/v1" --api-key EMPTY --eval-type openai_api \
    --datasets "$dataset" --dataset-args "{\"$dataset\": {\"few_shot_num\": $shots$drawn$source}}" \
    --generation-config "{\"temperature\": 0, \"reasoning_effort\": \"$effort\"$most, \"timeout\": 3600}" \
    --eval-batch-size "$batch" --seed 42 "$@"
[ -z "$data" ] || set -- env HF_HUB_OFFLINE=1 "$@"
quoted "$@"
[ -z "$dry" ] || exit 0
hint=''
[ -n "$data" ] || hint='
If it could not download the questions: get their folder onto this machine and name it with --data.'
"$@" || fail "evalscope did not finish (its last lines say why); what is answered is kept in $out, and the same command
goes on from there. If it says that the identity does not match: $out holds a run with other settings or of another
address; name another folder with --out.$hint"
exec "$python" "$here/eval_report.py" "$out"

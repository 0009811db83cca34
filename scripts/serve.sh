#!/bin/sh
# Serves gpt-oss with stock `vllm serve` and the flags of the Ascend article; docs/running-on-910b.md explains them.
set -eu
program=serve.sh
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$here/lib.sh"

usage() {
    cat <<'END'
usage: scripts/serve.sh --model CHECKPOINT [options] [-- flags of vllm serve]

Serves gpt-oss with stock vllm serve: 20b on one 910B of 64 GB, 120b on four or eight; on two with
NPU_GPTOSS_EXPERT_WEIGHTS=packed. When the server answers, the script prints a request to try.

  --model CHECKPOINT     folder in the official layout, MXFP4 or BF16, or a name on the hub
  --on npu|cpu|emulated  where: an Ascend 910B (default), the CPU, the emulated 910B of `make setup-emulated`, or with
                         emulated-9.1 that of `make setup-emulated-9.1`
  --cards N              tensor parallel size: by default 1, and 4 for 120b
  --devices LIST         which NPUs, such as 0,1,2,3 (ASCEND_RT_VISIBLE_DEVICES); by default the first ones
  --mode MODE            eager, piecewise or full (decode steps as one graph); default the stack's, on a CPU eager
  --capture-sizes LIST   batch sizes for which graphs are captured; by default 16,10,4,2,1;
                         with more --max-seqs or with drafts, every size that a step can have
  --max-len N            tokens of prompt and answer together; default 16384
  --max-seqs N           requests at a time; default 16
  --max-batched-tokens N tokens in a step; default 4096
  --memory FRACTION      part of the device memory that vLLM may use; default 0.95
  --name NAME            name of the served model; default the last part of CHECKPOINT
  --host HOST            default 127.0.0.1: this machine alone; --host 0.0.0.0: everybody who reaches it
  --port PORT            default 8085
  --dry-run              print the command, run nothing
  --help                 this text

Flags after -- go to vllm serve last, so they win. Ctrl-C stops the server. The server asks its clients for the key in
the environment variable VLLM_API_KEY, when that is set. On a 910B each worker is bound to the cores beside its card, and
several cards use HCCL_OP_EXPANSION_MODE=AIV (docs/tuning.md); an --additional-config or that variable of yours wins.
END
}

model='' where=npu cards='' devices='' mode='' sizes='' max_len=16384 max_seqs=16 batched=4096 memory=0.95
name='' host=127.0.0.1 port=8085 dry=''
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) usage && exit 0 ;;
    --dry-run) dry=1 && shift && continue ;;
    --) shift && break ;;
    --model | --on | --cards | --devices | --mode | --capture-sizes | --max-len | --max-seqs | --max-batched-tokens | \
        --memory | --name | --host | --port) value "$1" $# ;;
    *) fail "there is no option $1; --help lists them, and flags of vllm serve go after --." ;;
    esac
    case $1 in
    --model) model=$2 ;;
    --on) where=$2 ;;
    --cards) number "$1" "$2" && cards=$2 ;;
    --devices)
        case ,$2, in *,,* | *[!0-9,]*) fail "--devices wants numbers of NPUs such as 0,1, got '$2'." ;; esac
        # CANN refuses other orders (EE1001)
        [ "$(printf '%s\n' "$2" | tr ',' '\n' | sort -nu | paste -sd , -)" = "$2" ] ||
            fail "--devices wants each NPU once, in ascending order, got '$2'."
        devices=$2
        ;;
    --mode) mode=$2 ;;
    --capture-sizes) numbers "$1" "$2" && sizes=$2 ;;
    --max-len) number "$1" "$2" && max_len=$2 ;;
    --max-seqs) number "$1" "$2" && max_seqs=$2 ;;
    --max-batched-tokens) number "$1" "$2" && batched=$2 ;;
    --memory) fraction "$1" "$2" && memory=$2 ;;
    --name) name=$2 ;;
    --host) host=$2 ;;
    --port) number "$1" "$2" && port=$2 ;;
    esac
    shift 2
done

stack=''
case $where in
npu | cpu | emulated) ;;
emulated-9.1) where=emulated stack=-9.1 ;;
*) fail "--on wants npu, cpu, emulated or emulated-9.1, got '$where'." ;;
esac
[ -n "$mode" ] || case $where in cpu) mode=eager ;; esac
case $mode in '' | eager | piecewise | full) ;; *) fail "--mode wants eager, piecewise or full, got '$mode'." ;; esac
[ "$where" != cpu ] || [ "$mode" = eager ] || fail "there are no graphs on a CPU; leave out --mode $mode."
[ "$port" -le 65535 ] || fail "--port $port is not between 1 and 65535."

# which of the two it is: the number of layers tells, for a name on the hub the name
size=other offline=''
[ -n "$model" ] || fail "--model is missing: the folder of a checkpoint. A small one: npu-gptoss tiny DIR --trained"
if [ -d "$model" ]; then
    offline=1
    [ -f "$model/config.json" ] || fail "$model holds no config.json: it is not a checkpoint in the official layout."
    any_file "$model"/*.safetensors || fail "$model holds no *.safetensors: it is not a complete checkpoint."
    layers=$(sed -n 's/.*"num_hidden_layers" *: *\([0-9]*\).*/\1/p' "$model/config.json" | head -n 1)
    case $layers in 24) size=20b ;; 36) size=120b ;; esac
else
    case $model in
    /* | .* | *[!/]/*/* | *[!A-Za-z0-9_./-]*) fail "--model $model is not a folder. A small checkpoint: npu-gptoss tiny DIR --trained" ;;
    */*) ;;
    *) fail "--model $model is neither a folder nor a name on the hub such as openai/gpt-oss-20b." ;;
    esac
    case $model in *120b*) size=120b ;; *20b*) size=20b ;; esac
fi
path=${model%/}
case $path in */snapshots/*) path=${path%/snapshots/*} path=${path##*--} ;; esac # the folder is a hash, in the cache
[ -n "$name" ] || name=${path##*/}

count=''
[ -z "$devices" ] || count=$(printf '%s\n' "$devices" | tr ',' '\n' | wc -l | tr -d ' ')
[ -n "$cards" ] || cards=$count
[ -n "$cards" ] || case $size,$where in 120b,npu) cards=4 ;; *) cards=1 ;; esac
[ -z "$count" ] || [ "$count" = "$cards" ] || fail "--devices names $count NPUs and --cards says $cards."
case $cards in 1 | 2 | 4 | 8) ;; *) fail "gpt-oss has 8 key heads: --cards wants 1, 2, 4 or 8, got $cards." ;; esac
if [ "$size" = 120b ] && [ "$where" = npu ] && [ "$cards" -lt 4 ]; then
    packed=${NPU_GPTOSS_EXPERT_WEIGHTS:-}
    [ "$cards,$packed" = 2,packed ] || fail "120b takes 234 GB as BF16, and $cards of 64 GB have $((64 * cards)): use \
--cards 4 or 8. On two cards it fits with NPU_GPTOSS_EXPERT_WEIGHTS=packed, which needs Triton-Ascend."
fi
[ "$where" != cpu ] || [ "$cards" = 1 ] || fail "on a CPU there is one card; leave out --cards and --devices."

tell_exposure "$host" "$@"

# what the user says about these is left alone; nobody reads a file that --config names
configured='' groups='' drafts=''
for word in "$@"; do
    case $word in
    --config | --config=*) configured=1 groups=perhaps ;;
    --additional*) configured=1 ;;
    --data[-_]p* | -dp* | --enable[-_]ex* | -ep | --pipeline* | -pp*) groups=yes ;;
    --speculative* | -sc*) drafts=yes ;;
    --port | --port=* | --host | --host=* | --served[-_]model*) fail "$word stands behind --: write --port, --host and \
--name before it, so that this script waits for the server there." ;;
    esac
done

# put together from the end, so that flags of the user come last
[ "$where" = cpu ] || set -- --gpu-memory-utilization "$memory" "$@"
case $mode in
eager) set -- --enforce-eager "$@" ;;
piecewise) graphs='"cudagraph_mode": "PIECEWISE"' ;;
full) graphs='"cudagraph_mode": "FULL_DECODE_ONLY"' ;;
*) graphs='' ;; # PIECEWISE with CANN 8.3, FULL_DECODE_ONLY with 9.1, FULL_AND_PIECEWISE with 9.1 and n-grams
esac
# a step has a row for each request and each draft, and one larger than every graph runs without
[ -n "$sizes$drafts" ] || [ "$max_seqs" -gt 16 ] || sizes=16,10,4,2,1
[ -z "$sizes" ] || graphs="${graphs:+$graphs, }\"cudagraph_capture_sizes\": [$sizes]"
[ "$mode" = eager ] || [ -z "$graphs" ] || set -- --compilation-config "{$graphs}" "$@"
# vllm-ascend learns from these three which cores are beside which card
missing=''
for tool in npu-smi lspci lscpu; do
    command -v "$tool" >/dev/null || missing="$missing${missing:+, }$tool"
done
if [ "$where" = npu ] && [ -z "$configured" ]; then
    if [ -z "$missing" ]; then
        set -- --additional-config '{"enable_cpu_binding": true}' "$@"
    else
        say "workers are not bound to the cores beside their cards, for want of $missing."
    fi
fi
set -- serve "$model" --served-model-name "$name" --host "$host" --port "$port" --tensor-parallel-size "$cards" \
    --max-model-len "$max_len" --max-num-seqs "$max_seqs" --max-num-batched-tokens "$batched" \
    --enable-log-requests --enable-auto-tool-choice --tool-call-parser openai "$@"

root=$(CDPATH='' cd -- "$here/.." && pwd)
case $where in
emulated)
    emulate=${ASCEND_EMULATOR_VENV:-$root/.venv-emulated$stack}/bin/npu-gptoss
    [ -n "$dry" ] || [ -x "$emulate" ] ||
        fail "there is no emulated environment; make it once with: make setup-emulated$stack"
    python=${emulate%/*}/python
    set -- "$emulate" emulate --devices "$cards" -- vllm "$@"
    ;;
*)
    vllm=vllm python=python3
    [ "$where" = npu ] || [ ! -x "$root/.venv/bin/vllm" ] || vllm=$root/.venv/bin/vllm python=$root/.venv/bin/python
    [ -n "$dry" ] || command -v "$vllm" >/dev/null ||
        fail "vllm is not there. On a 910B: docs/running-on-910b.md; for the CPU: make setup"
    set -- "$vllm" "$@"
    ;;
esac

# what a CPU wants, emulated NPUs included; what the user has set stays
threads=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1) space=4
[ "$size" != other ] || threads=1 space=1
case $where in
cpu)
    [ -n "${OMP_NUM_THREADS:-}" ] || set -- "OMP_NUM_THREADS=$threads" "$@"
    [ -n "${VLLM_CPU_KVCACHE_SPACE:-}" ] || set -- "VLLM_CPU_KVCACHE_SPACE=$space" "$@"
    [ -n "${NPU_GPTOSS_PLATFORM:-}" ] || set -- NPU_GPTOSS_PLATFORM=cpu "$@"
    ;;
emulated) [ -n "${OMP_NUM_THREADS:-}" ] || set -- "OMP_NUM_THREADS=$threads" "$@" ;;
npu)
    [ -z "$devices" ] || set -- "ASCEND_RT_VISIBLE_DEVICES=$devices" "$@"
    # vllm-ascend 0.23 takes a vLLM whose vllm.__version__ is 0.23.0+empty for a later one, and ends at its start
    asked='from npu_gptoss.serving.releases import own_version, package_folder as f; print(own_version(f("vllm")))'
    [ -n "${VLLM_VERSION:-}" ] || case $(python3 -c "$asked" 2>&1) in
    0.23.0+*) set -- VLLM_VERSION=0.23.0 "$@" ;;
    esac
    ;;
esac
# collectives on the vector cores: fewer streams, and a hang where several groups of ranks communicate side by side
if [ -z "${HCCL_OP_EXPANSION_MODE+set}" ]; then
    [ "$cards" = 1 ] || [ -n "$groups" ] || set -- HCCL_OP_EXPANSION_MODE=AIV "$@"
elif [ "$HCCL_OP_EXPANSION_MODE,$groups" = AIV,yes ]; then
    say "HCCL_OP_EXPANSION_MODE=AIV can hang with data, expert or pipeline parallelism: unset it (docs/tuning.md)."
fi
[ -z "$offline" ] || [ -n "${HF_HUB_OFFLINE:-}" ] || set -- HF_HUB_OFFLINE=1 "$@"
[ -n "${VLLM_NO_USAGE_STATS:-}" ] || set -- VLLM_NO_USAGE_STATS=1 "$@"
set -- env "$@"

quoted "$@"
[ -z "$dry" ] || exit 0
port_is_free "$host" "$port" || fail "the server cannot listen on $host port $port; choose another with --port."
tell_when_ready "$here" "$python" "$host" "$port" "$name" "$key"
exec "$@"

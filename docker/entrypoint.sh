#!/usr/bin/env bash
# Entry point of the images.
#   [serve] [OPTIONS]   starts the server; on a 910B OPTIONS are of scripts/serve.sh, on a CPU of scripts/serve_here.py
#   doctor, kernels …   run as commands of npu-gptoss: every word that is no program
#   PROGRAM …           runs as it is
# The server listens on HOST (127.0.0.1, which only the container reaches) and PORT (8000).
set -eo pipefail
home=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

# Like the entry point of the CANN images. No `set -u`: these scripts read unset variables.
toolkit=${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit/latest}
ascend=${toolkit%/ascend-toolkit/*}
for file in "$ascend/ascend-toolkit/set_env.sh" "$ascend/nnal/atb/set_env.sh"; do
    # shellcheck disable=SC1090
    [ ! -f "$file" ] || . "$file"
done

case ${1:-} in
serve) shift ;;
--help | --version) exec npu-gptoss "$@" ;;
'' | --*) ;; # as vLLM's own image takes them
*)
    if command -v -- "$1" >/dev/null; then
        exec "$@"
    fi
    exec npu-gptoss "$@"
    ;;
esac

if [ "${NPU_GPTOSS_PLATFORM:-}" = cpu ]; then
    # the container's log shows the server's; exec keeps the process id
    log=$(mktemp -t serve.XXXXXX)
    tail --pid=$$ --lines=+1 --follow=name "$log" &
    exec python3 "$home/scripts/serve_here.py" --log "$log" --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" "$@"
fi
python3 "$home/docker/preflight.py" || exit 1
exec "$home/scripts/serve.sh" --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" "$@"

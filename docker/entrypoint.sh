#!/usr/bin/env bash
# What the images start with.
#   serve [OPTIONS]   the server: on a 910B the options of scripts/serve.sh, on a CPU those of scripts/serve_here.py
#   doctor, kernels … the commands of npu-gptoss: whatever is no program
#   anything else     is run as it stands
# The server listens on 127.0.0.1, which a container alone reaches, unless HOST names another address; on PORT, or 8000.
set -eo pipefail
home=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

# As the entry point of the CANN images does. Not under `set -u`: these scripts read variables that may be unset.
toolkit=${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit/latest}
ascend=${toolkit%/ascend-toolkit/*}
for file in "$ascend/ascend-toolkit/set_env.sh" "$ascend/nnal/atb/set_env.sh"; do
    # shellcheck disable=SC1090
    [ ! -f "$file" ] || . "$file"
done

if [ "${1:-serve}" != serve ]; then
    if command -v -- "$1" >/dev/null; then
        exec "$@"
    fi
    exec npu-gptoss "$@"
fi

shift || true
if [ "${NPU_GPTOSS_PLATFORM:-}" = cpu ]; then
    # so that the log of the container is the server's; exec keeps the process id
    log=$(mktemp -t serve.XXXXXX)
    tail --pid=$$ --lines=+1 --follow=name "$log" &
    exec python3 "$home/scripts/serve_here.py" --log "$log" --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" "$@"
fi
python3 "$home/docker/preflight.py" || exit 1
exec "$home/scripts/serve.sh" --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" "$@"

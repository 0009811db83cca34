#!/bin/sh
# Runs the 910B image with the devices and the driver's files that it needs, and without --privileged.
set -eu
program=run-910b.sh
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
. "$here/../scripts/lib.sh"

usage() {
    cat <<'END'
usage: docker/run-910b.sh --model DIR [options] [-- options of scripts/serve.sh]

Starts the container npu-gptoss (npu-gptoss-PORT for another port than 8000), which serves a checkpoint on the Ascend
910B of this host, and stays in the foreground.

  --model DIR      folder of the checkpoint, mounted read-only as /model
  --devices LIST   numbers of the NPUs, as in /dev/davinci<n>; default 0. For 120b: 0,1,2,3
  --host ADDRESS   address of this host where the server listens; default 127.0.0.1, which only this host reaches
  --port PORT      port of this host; default 8000
  --name NAME      name of the served model; default the last part of DIR, or its repository in a hub's cache
  --image IMAGE    default npu-gptoss:910b
  --dry-run        print the command, run nothing
  --help           this text

If the environment variable VLLM_API_KEY is set, clients must send that key.
END
}

model='' devices=0 host=127.0.0.1 port=8000 name='' image=npu-gptoss:910b dry=''
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h) usage && exit 0 ;;
    --dry-run) dry=1 && shift && continue ;;
    --) shift && break ;;
    --model | --devices | --host | --port | --name | --image) [ $# -gt 1 ] && [ -n "$2" ] || fail "$1 wants a value." ;;
    *) fail "there is no option $1; --help lists them, and those of scripts/serve.sh go after --." ;;
    esac
    case $1 in
    --model) model=$2 ;;
    --devices) devices=$2 ;;
    --host) host=$2 ;;
    --port) port=$2 ;;
    --name) name=$2 ;;
    --image) image=$2 ;;
    esac
    shift 2
done

[ -n "$model" ] || fail "--model is missing: the folder of a checkpoint in the official layout."
case ,$devices, in *,,* | *[!0-9,]*) fail "--devices wants numbers of NPUs such as 0,1,2,3, got '$devices'." ;; esac
case $host in
*[!0-9a-fA-F:.]*) fail "--host wants an address of this host such as 127.0.0.1 or 0.0.0.0, got '$host'." ;;
*:*) address="[$host]" ;; # IPv6
*) address=$host ;;
esac
case $port in *[!0-9]* | ??????*) fail "--port wants a number from 1 to 65535, got '$port'." ;; esac
[ "$port" -ge 1 ] && [ "$port" -le 65535 ] || fail "--port $port is not between 1 and 65535."
numbers=$(printf '%s\n' "$devices" | tr ',' '\n')
count=$(printf '%s\n' "$numbers" | wc -l | tr -d ' ')
[ "$(printf '%s\n' "$numbers" | sort -u | wc -l | tr -d ' ')" = "$count" ] || fail "--devices $devices names an NPU twice."
case $count in 1 | 2 | 4 | 8) ;; *) fail "gpt-oss has 8 key heads: 1, 2, 4 or 8 NPUs, got $count ($devices)." ;; esac
case $model in /*) ;; *) model=$PWD/$model ;; esac
case $model in *:*) fail "docker cannot mount $model: a ':' separates the parts of a mount." ;; esac
model=${model%/}
case $model in
*/snapshots/*) # of a hub's cache: its files are links to ../../blobs, which have to be mounted too
    mounted=${model%/snapshots/*} inside=/model/snapshots/${model##*/snapshots/}
    [ -n "$name" ] || name=${mounted##*--}
    ;;
*) mounted=$model inside=/model ;;
esac
[ -n "$name" ] || name=${model##*/}

# last to first: each is put in front of the others
managers='/dev/hisi_hdc /dev/devmm_svm /dev/davinci_manager'
driver='/etc/ascend_install.info /usr/local/bin/npu-smi /usr/local/dcmi'
driver="$driver /usr/local/Ascend/driver/version.info /usr/local/Ascend/driver/lib64"

if [ -z "$dry" ]; then
    [ -f "$model/config.json" ] || fail "$model holds no config.json: it is not a checkpoint in the official layout."
    seen=$(readlink -f -- "$mounted")
    for file in "$model"/*; do
        case $(readlink -f -- "$file") in
        "$seen"/*) ;;
        *) fail "$file leads out of $mounted, so the container cannot see it; cp -rL copies a checkpoint without links." ;;
        esac
    done
    for number in $numbers; do
        [ -c "/dev/davinci$number" ] || fail "/dev/davinci$number is not there; 'npu-smi info' lists the NPUs of this host."
    done
    for file in $managers; do
        [ -c "$file" ] || fail "$file is not there: is the driver (Ascend HDK) installed and loaded?"
    done
    for file in $driver; do
        [ -e "$file" ] || fail "$file is not there: it belongs to the driver (Ascend HDK), which the host has to have."
    done
    command -v docker >/dev/null || fail "docker is not there."
fi

tell_exposure "$host" "$@"

# the image's command first, docker's options in front of it
set -- "$image" serve --model "$inside" --name "$name" --cards "$count" "$@"
for file in $driver; do
    set -- --volume "$file:$file:ro" "$@"
done
for file in $managers; do
    set -- --device "$file" "$@"
done
for number in $(printf '%s\n' "$numbers" | sort -rn); do
    set -- --device "/dev/davinci$number" "$@"
done
# HwHiAiUser's group is 1000 in the image; on the host it may have another number.
group=$(stat -c %g /dev/davinci_manager 2>/dev/null || echo 1000)
[ "$group" = 1000 ] || set -- --group-add "$group" "$@"
# by name: no command line shows its value
[ -z "${VLLM_API_KEY:-}" ] || set -- --env VLLM_API_KEY "$@"
[ -z "${NPU_GPTOSS_EXPERT_WEIGHTS:-}" ] || set -- --env NPU_GPTOSS_EXPERT_WEIGHTS "$@"
# The image is read-only. CANN, torch and vLLM write logs, compiled kernels, caches and sockets into memory, which ends
# with the container. Compiled kernels are loaded from there, so it is mounted exec.
for folder in /tmp:mode=1777 /home/HwHiAiUser:uid=1000,gid=1000,mode=700; do
    set -- --tmpfs "${folder%%:*}:rw,exec,nosuid,nodev,${folder#*:}" "$@"
done
container=npu-gptoss
[ "$port" = 8000 ] || container=npu-gptoss-$port # servers of other NPUs run beside each other
set -- docker run --rm --init --name "$container" --shm-size 1g --security-opt no-new-privileges --cap-drop ALL --read-only \
    --env HOST=0.0.0.0 --publish "$address:$port:8000" --volume "$mounted:/model:ro" "$@"

if [ -n "$dry" ]; then
    quoted "$@"
    exit 0
fi
exec "$@"

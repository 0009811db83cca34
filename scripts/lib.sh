# What serve.sh, perf.sh and eval.sh share. POSIX sh, sourced; `program` is set by the script that sources it.
# shellcheck shell=sh
: "${program:?}"

say() {
    printf '%s: %s\n' "$program" "$*" >&2
}

fail() {
    say "$@"
    exit 2
}

# value OPTION COUNT-OF-ARGUMENTS-LEFT: an option that wants a value has one
value() {
    [ "$2" -ge 2 ] || fail "$1 wants a value; $program --help lists what it takes."
}

# number OPTION VALUE: a whole number above 0, of at most nine digits, with which any shell computes
number() {
    case $2 in
    '' | 0* | *[!0-9]* | ??????????*) fail "$1 wants a whole number above 0, got '$2'." ;;
    esac
}

# fraction OPTION VALUE: above 0, at most 1
fraction() {
    case $2 in
    0.*[!0-9]*) ;;
    1 | 1.0 | 0.*[1-9]*) return ;;
    esac
    fail "$1 wants a fraction such as 0.95, got '$2'."
}

# numbers OPTION LIST: whole numbers above 0, separated by commas
numbers() {
    case ,$2, in
    *,,* | *,0* | *[!0-9,]*) fail "$1 wants whole numbers above 0 with commas between them, got '$2'." ;;
    esac
}

# any_file PATTERN-ALREADY-EXPANDED…: whether one of them is a file
any_file() {
    for file in "$@"; do
        [ -f "$file" ] && return 0
    done
    return 1
}

# quoted WORD…: one line that a shell reads back as the same words, but for keys and tokens, which it does not show
quoted() {
    line='' secret=''
    for word in "$@"; do
        case $word in
        --api[-_]k*=* | --hf[-_]t*=* | VLLM_API_KEY=* | HF_TOKEN=*) word="${word%%=*}=***" secret='' ;;
        --api[-_]k* | --hf[-_]t*) secret=1 ;;
        -*) secret='' ;;
        EMPTY) ;; # what clients send where no key is asked for
        *) [ -z "$secret" ] || word='***' ;;
        esac
        case $word in
        '' | *[!A-Za-z0-9_./:=,@%+-]*)
            word="'$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'"
            ;;
        esac
        line="$line${line:+ }$word"
    done
    printf '%s\n' "$line"
}

# tell_exposure HOST FLAG-OF-VLLM…: on standard error, what an address means that others reach, and a key in a command
tell_exposure() {
    reached=$1 key=${VLLM_API_KEY:+set} before=''  # `key` is read by serve.sh, too
    shift
    for word in "$@"; do
        case $before$word in
        --host=* | --host\ *) reached=${word#--host=} ;;
        --api[-_]k*) key=shown ;;
        esac
        case $word in --host) before='--host ' ;; *) before='' ;; esac
    done
    [ "$key" != shown ] || say "everybody on this machine can read a key in a command (ps); set VLLM_API_KEY instead."
    case $reached,$key in 127.*,* | localhost,* | ::1,* | *,?*) return ;; esac
    if [ -n "${container:-}" ] || [ -e /.dockerenv ]; then
        say "whoever reaches the published port can use the server: it asks for no key, and vLLM has known holes."
        say "Publish the port on 127.0.0.1, or set VLLM_API_KEY and put a proxy before it (docs/exposing-the-server.md)."
    else
        say "whoever reaches $reached can use the server: it asks for no key, and vLLM has known holes."
        say "Set VLLM_API_KEY and put a proxy before it (docs/exposing-the-server.md), or listen on 127.0.0.1."
    fi
}

# tell_when_ready FOLDER-OF-SCRIPTS PYTHON HOST PORT NAME KEY: waits beside the server, which takes the place of this
# shell, until it answers; then prints a request to try. Ends with the server. KEY: not empty where it asks for one.
tell_when_ready() {
    (
        cd "$1/.." || exit
        "$2" -c 'import sys; from scripts import serve_here; serve_here.invite_when_ready(*sys.argv[1:])' \
            $$ "$3" "$4" "$5" "$6" 2>/dev/null &
    )
}

# port_is_free HOST PORT: whether a server could listen there; yes where no Python can tell
port_is_free() {
    ! command -v python3 >/dev/null || python3 - "$1" "$2" <<'END'
import socket, sys
try:
    family, kind, protocol, _, address = socket.getaddrinfo(sys.argv[1], int(sys.argv[2]), type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
except OSError as error:
    sys.exit(str(error))
END
}

# find_evalscope FOLDER-OF-SCRIPTS: sets `evalscope` and `python` to the programs of evalscope's environment
find_evalscope() {
    if [ -x "$1/../.venv-evalscope/bin/evalscope" ]; then
        evalscope=$(CDPATH='' cd -- "$1/.." && pwd)/.venv-evalscope/bin/evalscope
        python=${evalscope%/*}/python
    else
        evalscope=$(command -v evalscope) || fail "evalscope is not there. Set it up once, in an environment of its own: \
make setup-evalscope"
        python=${evalscope%/*}/python
        [ -x "$python" ] || python=python3
    fi
}

# ask_server FOLDER-OF-SCRIPTS URL MODEL: sets `model`, `folder` and `longest` to the served model's name, checkpoint
# and longest context in tokens
ask_server() {
    answer=$("$python" "$1/served_model.py" "$2" "$3") || exit 2
    # shellcheck disable=SC2034  # for the script that sources this
    model=${answer%%"$(printf '\t')"*}
    # shellcheck disable=SC2034
    longest=${answer##*"$(printf '\t')"}
    answer=${answer%"$(printf '\t')"*}
    # shellcheck disable=SC2034
    folder=${answer#*"$(printf '\t')"}
}

#!/bin/sh
# Unpacks parts of the kit (build_four_gpus_kit.py), and runs four_gpus.py with the kit's own Python.
#
#   usage: four_gpus.sh PART_FOLDER... [-- ARGUMENTS OF four_gpus.py]       $KIT: where to (/tmp/four)
KIT=${KIT:-/tmp/four}
mkdir -p "$KIT" || exit 1
pids=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    for archive in "$1"/*.tar.xz; do
        tar xJf "$archive" -C "$KIT" &
        pids="$pids $!"
    done
    shift
done
for pid in $pids; do wait "$pid" || { echo "four_gpus.sh: a part could not be unpacked" >&2; exit 1; }; done
[ $# -gt 1 ] || exit 0
shift
printf 'home = %s\ninclude-system-site-packages = false\n' "$KIT/root/python/bin" >"$KIT/root/stub-env/pyvenv.cfg"
# For this interpreter alone: the program puts both back for what it starts.
export FOUR_LD_LIBRARY_PATH="$LD_LIBRARY_PATH" FOUR_PYTHONPATH="$PYTHONPATH"
export LD_LIBRARY_PATH="$KIT/root/python/lib" PYTHONPATH="$KIT/clients" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
exec "$KIT/root/stub-env/bin/python3" "$(dirname "$0")/four_gpus.py" --kit "$KIT" "$@"

#!/bin/bash
# Starts a run on the hosts in the file `hosts` that answer, one process each, and starts it again when some are lost.
# Each line begins with the name of a host. The first is the one where this script runs, and JAX's coordinator.
survivors='import sys; from jvarlen.parallel import Layout
from jvarlen.experimental.elastic import surviving_layout
print(surviving_layout(Layout(data=int(sys.argv[1])), int(sys.argv[2]), 8).data)'
saved() { ls runs/mine/checkpoints 2>/dev/null; }
for start in $(seq 20); do
  awk 'NF && !/^#/ {print $1}' hosts >names
  while read -r host; do
    if timeout 20 ssh -n -o BatchMode=yes -o ConnectTimeout=5 "$host" true; then echo "$host slots=1"; fi
  done <names >alive
  n=$(python -c "$survivors" "$(wc -l <names)" "$(wc -l <alive)") || exit 2
  before=$(saved)
  mpirun -n "$n" --hostfile alive --bind-to none \
    jvarlen train --distributed --num-microbatches 8 --run-dir runs/mine
  code=$?
  case $code in 0 | 130 | 143) exit $code ;; esac
  # 2: wrong input, or others are lost. After wrong input nothing new is saved.
  if [ $code = 2 ] && [ "$(saved)" = "$before" ]; then exit 2; fi
done
exit "$code"

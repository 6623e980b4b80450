#!/bin/sh
cd '/home/a b/$(touch x);it'"'"'s "here"' || exit 2
exec mpirun -np 2 -ppn 1 @PYTHON@ -m rankwise.agent '/home/a b/$(touch x);it'"'"'s "here"/runs/`touch y` & *' </dev/null

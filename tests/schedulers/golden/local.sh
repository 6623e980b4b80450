#!/bin/sh
cd '/home/a b/$(touch x);it'"'"'s "here"' || exit 2
exec @PYTHON@ -P -m rankwise.agent '/home/a b/$(touch x);it'"'"'s "here"/runs/`touch y` & *'

#!/bin/sh
cd @FOLDER@ || exit 2
exec @PYTHON@ -m rankwise.agent @FOLDER@/runs/stopped

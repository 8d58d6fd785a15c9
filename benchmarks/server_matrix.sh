#!/bin/bash
# The whole server on a machine with one large GPU: what an append costs a gateway, then every load, 8 bits and 16.
# About nine minutes with 60 s a load. Results go to the folder given, and to standard output.
#     benchmarks/server_matrix.sh FOLDER [SECONDS] [WORKERS] [RECORDING.wav]
out=$1 seconds=${2:-60} workers=${3:-6}
audio=${4:+--audio $4}
mkdir -p "$out"
python -m benchmarks.append_cost --sessions 100 --periods 100 --profile "$out/profile" --json "$out/append-cost.json"
python -m benchmarks.gpu_server --kv fp8 --workers "$workers" --seconds "$seconds" --logs "$out/fp8" \
    --json "$out/fp8.json" $audio --joins-per-second 60 --clients 5 --sessions 600 500:24000:50 1000:16000:80:0.5 \
    --kill-worker --rolling-restart --move-seconds 12
python -m benchmarks.gpu_server --kv bf16 --workers "$workers" --seconds "$seconds" --logs "$out/bf16" \
    --json "$out/bf16.json" $audio --joins-per-second 60 --clients 5 --sessions 400

export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TRITON_INTERPRET=0 OMP_NUM_THREADS=1
python3 .scratch/thr.py $OUT/thr.json 2>&1 | tail -20
for p in "float16" "bfloat16" "float32 split" "float32 tf32"; do set -- $p
 timeout 150 python3 -m contrastile verify --backend triton --device cuda --dtype $1 ${2:+--precision $2} --jobs 4 --case limits limits-hot limits-ids limits-rows drawn --quiet 2>&1 | tail -8 &
done
timeout 150 python3 -m contrastile verify --backend torch --device cuda --dtype bfloat16 float64 --jobs 3 --case limits limits-hot limits-ids limits-rows --quiet 2>&1 | tail -5 &
wait
timeout 100 python3 .scratch/ret.py $OUT/ret.json 2>&1 | tail -5
timeout 60 python3 -m pytest -p no:benchmark -p no:cacheprovider -q tests/test_retrieval.py 2>&1 | tail -3

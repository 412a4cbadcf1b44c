"""The script that fetches the benchmarks' data sets: readers of each format, without a network."""

import gzip
import io
import pathlib
import runpy
import urllib.error

import numpy as np
import pytest
from numpy.testing import assert_array_equal

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "doc" / "benchmarks" / "download_data.py"
ROWS = {
    "heart": "70.0 1.0 4.0 130.0 322.0 0.0 2.0 109.0 0.0 2.4 2.0 3.0 3.0 2\n",
    "haberman": "30,64,1,1\n50,58,2,2\n",
    "ionosphere": ",".join(["1", "0"] * 17) + ",g\n" + ",".join(["0"] * 34) + ",b\n",
    "breast_wisconsin": "1000025,5,1,1,1,2,1,3,1,1,2\n1057013,8,4,5,1,2,?,7,3,1,4\n"
    "1017122,8,10,10,8,7,10,9,7,1,4\n",
    "crabs": '"","sp","sex","index","FL","RW","CL","CW","BD"\n'
    '1,"O","F",1,8.1,6.7,16.1,19,7\n2,"B","M",2,8.8,7.7,18.1,20.8,7.4\n',
    "contraception": '"","woman","district","use","livch","age","urban"\n'
    '"1","1","9","N","3+",18.44,"Y"\n"2","2","10","Y","1",-5.5,"N"\n',
    "verb_agg": "rownames,Anger,Gender,item,resp,id,btype,situ,mode,r2\n"
    "1,20,M,S1WantCurse,no,7,curse,other,want,N\n2,11,F,S2DoShout,yes,12,shout,self,do,Y\n",
    "insteval": "rownames,s,d,studage,lectage,service,dept,y\n1,1,1002,2,2,0,6,5\n",
}
EXPECTED = {
    "heart": ([[70, 1, 4, 130, 322, 0, 2, 109, 0, 2.4, 2, 3, 3]], [1]),
    "haberman": ([[30, 64, 1], [50, 58, 2]], [0, 1]),
    "ionosphere": ([[1, 0] * 17, [0] * 34], [1, 0]),
    "breast_wisconsin": ([[5, 1, 1, 1, 2, 1, 3, 1, 1], [8, 10, 10, 8, 7, 10, 9, 7, 1]], [0, 1]),
    "crabs": ([[1, 1, 8.1, 6.7, 16.1, 19, 7], [0, 2, 8.8, 7.7, 18.1, 20.8, 7.4]], [0, 1]),
    "contraception": ([[18.44, 1, 0, 0, 1], [-5.5, 0, 1, 0, 0]], [0, 1]),
    "verb_agg": ([[20, 1, 0, 0, 0, 0], [11, 0, 0, 1, 1, 1]], [0, 1]),
}


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("name", EXPECTED)
def test_rows_are_read_as_the_scripts_want_them(script, name):
    _, read, _ = script["SETS"][name]
    # splits of a real set are larger than these rows
    found = read(ROWS[name].encode())
    X, y = EXPECTED[name]
    assert_array_equal(found["X"], X)
    assert_array_equal(found["y"], y)
    assert_array_equal(found.get("group", [0, 1]), [0, 1])


def test_tables_pictures_and_sparse_rows(script):
    ratings = script["insteval"](ROWS["insteval"].encode())
    assert {name: values.tolist() for name, values in ratings.items()}["d"] == [1002]
    heading = "rownames,npreg,glu,bp,skin,bmi,ped,age,type\n"
    row = "1,5,86,68,28,30.2,0.364,24,{}\n"
    pima = script["pima"](
        (heading + row.format("No")).encode(), (heading + row.format("Yes")).encode()
    )
    assert_array_equal(pima["y"], [0, 1])
    sparse = script["a9a"](b"-1 3:1 11:1\n+1 123:1\n", b"+1 1:1\n")
    assert_array_equal(sparse["indices"], [2, 10, 122])
    assert_array_equal(sparse["y"], [0, 1])
    assert_array_equal(sparse["test_shape"], [1, 123])
    files = [
        gzip.compress(bytes(head) + bytes(body)) for head, body in ((16, [5] * 784), (8, [3])) * 2
    ]
    digits = script["mnist"](*files)
    assert digits["X_test"].shape == (1, 784) and digits["y_train"].tolist() == [3]


def test_training_rows_are_those_that_the_tables_were_made_with(script):
    rows = script["splits"](270, 81, 20)
    assert rows.shape == (20, 81) and np.all(np.diff(rows) > 0)
    assert_array_equal(rows[3], np.sort(np.random.RandomState(3).permutation(270)[:81]))


def test_a_dry_run_lists_what_is_not_there(script, tmp_path, capsys):
    (tmp_path / "heart.npz").touch()
    assert script["main"]([str(tmp_path), "--dry-run"]) == 0
    listed = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [name for name in script["SETS"] if name != "heart"]
    assert all(a.startswith("https://") for urls, *_ in script["SETS"].values() for a in urls)
    assert list(tmp_path.iterdir()) == [tmp_path / "heart.npz"]


def test_what_does_not_come_is_told_and_counted(script, tmp_path, capsys, monkeypatch):
    def answer(address, timeout):
        if "crabs" in address:
            return io.BytesIO(ROWS["crabs"].encode())
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    assert script["main"]([str(tmp_path), "--only", "crabs", "heart"]) == 2
    told = capsys.readouterr().out
    assert "2 rows came where 200 were expected" in told and "no network" in told
    assert not list(tmp_path.iterdir())

"""CSV files: any value comes back as it was written."""

from nprf_vit.engine.output.csv_file import append_rows, read_rows, write_rows


def test_any_text_comes_back(tmp_path):
    path = tmp_path / 'table.csv'
    texts = ['plain', 'a, b', 'a "quoted" word', '"', 'two\nlines', '', 'ä']
    write_rows(path, [{'number': number, 'text': text} for number, text in enumerate(texts)])
    assert read_rows(path) == [{'number': str(number), 'text': text} for number, text in enumerate(texts)]


def test_columns_are_those_of_all_rows_and_gaps_are_empty(tmp_path):
    path = tmp_path / 'table.csv'
    write_rows(path, [{'epoch': 1, 'loss': 0.1}, {'epoch': 2, 'top1': None, 'loss': float('nan')}])
    assert path.read_bytes() == b'epoch,loss,top1\n1,0.1,\n2,nan,\n'


def test_appended_rows_follow_one_header(tmp_path):
    path = tmp_path / 'table.csv'
    append_rows(path, [{'case': 'a, b', 'value': 1e-7}])
    append_rows(path, [{'case': 'c', 'value': 2}, {'case': 'd', 'value': 3}])
    assert path.read_text() == 'case,value\n"a, b",1e-07\nc,2\nd,3\n'

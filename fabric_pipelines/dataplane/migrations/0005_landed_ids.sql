-- Which tasks each landing settled, so that a row that is gone later is found by its id; totals of two definitions can
-- differ while nothing is missing, and agree while something is. Null: landed before this migration.
alter table fabric.acks add column ids int8multirange;
comment on column fabric.acks.ids is 'task ids that this transaction landed or buried';

-- Results are asked for by submission. A btree over 64 letters costs every landed row 130 B of WAL; these filters
-- are a few hundred bytes for a megabyte of table, and a new row costs them next to nothing.
create index generate_of_submission on fabric.generate
    using brin (submission_id text_bloom_ops (n_distinct_per_range = 100)) with (autosummarize = on);
create index embed_of_submission on fabric.embed
    using brin (submission_id text_bloom_ops (n_distinct_per_range = 100)) with (autosummarize = on);
create index hidden_states_of_submission on fabric.hidden_states
    using brin (submission_id text_bloom_ops (n_distinct_per_range = 100)) with (autosummarize = on);
create index results_of_submission on fabric.results
    using brin (submission_id text_bloom_ops (n_distinct_per_range = 100)) with (autosummarize = on);

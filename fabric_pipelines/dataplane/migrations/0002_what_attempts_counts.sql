-- What `attempts` counts, where a reader of the tables meets it (psql: \d+ fabric.embed).
comment on column fabric.generate.attempts is
    'failed attempts that were this task''s own, before the one that made this row; 0: it never failed. A lease that ran out or was handed back counts only once the task was alone in it';
comment on column fabric.embed.attempts is
    'failed attempts that were this task''s own, before the one that made this row; 0: it never failed. A lease that ran out or was handed back counts only once the task was alone in it';
comment on column fabric.hidden_states.attempts is
    'failed attempts that were this task''s own, before the one that made this row; 0: it never failed. A lease that ran out or was handed back counts only once the task was alone in it';
comment on column fabric.results.attempts is
    'failed attempts that were this task''s own, before the one that made this row; 0: it never failed. A lease that ran out or was handed back counts only once the task was alone in it';
comment on column fabric.dead_letters.attempts is
    'failed attempts that were this task''s own, all of them; 0: it was refused. A lease that ran out or was handed back counts only once the task was alone in it';

alter table fabric.dead_letters add column consumer text not null default '';
comment on column fabric.dead_letters.consumer is 'the worker''s session that held the task last';
